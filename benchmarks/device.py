"""Device jobs: whole collections on a GPU, their seconds before, in and after the batches, and what was planned.

Each section stores ``results/device.json`` before the next begins, the most valuable first, so that a run that is
cut short leaves what it has measured:

    gpt2 …     GPT-2 small, 8 batches of 8 × 512 tokens, float32, without and with its head, beside one gradient
               of the loss and curvlinops' whole collection
    mlp …      784-1024-1024-10, 8 batches of 256
    eigh       seconds, and bytes at the peak over n², of decompositions with and without vectors

It needs torch, numpy, scipy and transformers alone, and curvlinops for its comparison. Without a GPU it runs at sizes
that show that it works.

    python -m benchmarks.device [--sections gpt2_without_head eigh] [--output NAME] [--add]
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from benchmarks import results_file
from engine.linalg.eigensolvers import solvers
from kronoscope.local import measure

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCHES = 8
OVER_GRADIENT, OVER_PEER, OVER_BATCHES, OFF_PLAN = 0.75, 1.65, 1.3, 0.1
"""Most of: a batch over one gradient of the same layers, a whole job over curvlinops', whose factors stay on the
device, a whole job over its batches, and the peak's relative difference from the plan."""
HEAD_OVER_GRADIENT = 1.15
"""The same of a batch with a language model's head."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on the device, and the batches that are collected."""

    model: nn.Module
    task: str
    data: list[tuple[Any, Tensor]]

    def loss(self, batch: tuple[Any, Tensor]) -> Tensor:
        """The mean loss of one batch by plain PyTorch."""
        inputs, targets = batch
        if self.task == "causal_lm":
            logits = self.model(**inputs).logits
            return functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
        return functional.cross_entropy(self.model(inputs), targets)


@dataclass
class Clock:
    """Seconds of one collection: before its first batch, of each batch, and after the last."""

    moments: list[float] = field(default_factory=list)

    def batches(self, data: list[tuple[Any, Tensor]]) -> Iterator[tuple[Any, Tensor]]:
        """Hand out the batches, noting when each is asked for; the last entry is when no more is."""
        self.moments.clear()
        for batch in data:
            self.moments.append(now())
            yield batch
        self.moments.append(now())


def now() -> float:
    """Seconds, once the device is done with what it was given."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def decoder(*, head: bool) -> Case:
    """GPT-2 small with ``nn.Linear`` in place of ``Conv1D``, which the peer does not know."""
    small = DEVICE.type == "cpu"
    config = GPT2Config(
        n_layer=2 if small else 12,
        n_embd=64 if small else 768,
        n_head=4 if small else 12,
        n_positions=512,
        vocab_size=512 if small else 50257,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    for module in list(model.modules()):
        for place, child in list(module.named_children()):
            if isinstance(child, Conv1D):
                linear = nn.Linear(*child.weight.shape)
                linear.weight.data.copy_(child.weight.detach().T)
                linear.bias.data.copy_(child.bias.detach())
                setattr(module, place, linear)
    _train_linear(model, () if head else ("lm_head",))
    ids = torch.randint(0, config.vocab_size, (BATCHES, 2 if small else 8, 32 if small else 512)).to(DEVICE)
    data = [({"input_ids": each, "attention_mask": torch.ones_like(each)}, each) for each in ids]
    return Case(model=model.to(DEVICE).eval(), task="causal_lm", data=data)


def perceptron() -> Case:
    """Three layers, 784-1024-1024-10, batches of 256."""
    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    images = torch.randn(BATCHES, 256, 784).to(DEVICE)
    labels = torch.randint(10, (BATCHES, 256)).to(DEVICE)
    return Case(model=model.to(DEVICE).eval(), task="classification", data=list(zip(images, labels, strict=True)))


def _train_linear(model: nn.Module, besides: tuple[str, ...]) -> None:
    model.requires_grad_(requires_grad=False)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name not in besides:
            module.requires_grad_(requires_grad=True)


def collected(case: Case, self_check: str) -> dict[str, float]:
    """One whole job: seconds from call to returned factors, its parts, and its peak beside the plan's."""
    clock = Clock()
    gc.collect()
    held = _begin_peak()
    begun = now()
    found = measure(
        case.model,
        lambda: clock.batches(case.data),
        task=case.task,
        kinds=("factors",),
        collection={
            "fisher": "empirical",
            "batch_size": len(case.data[0][1]),
            "self_check": self_check,
            "exact_trace": False,
            "dtype": "float32",
        },
        memory={},
    )
    ended = now()
    spans = [later - earlier for earlier, later in zip(clock.moments, clock.moments[1:], strict=False)]
    return {
        "whole_seconds": ended - begun,
        "before_seconds": clock.moments[0] - begun,
        "batch_seconds": statistics.median(spans[1:]),
        "after_seconds": ended - clock.moments[-1],
        "peak_bytes": _peak() - held,
        "planned_bytes": found.plan["device_peak_bytes"] if found.plan else 0,
        "layers": len(found.layers),
    }


def _begin_peak() -> int:
    if DEVICE.type == "cpu":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    # a plan counts the model as well
    return 0


def _peak() -> int:
    return torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else 0


def gradient_seconds(case: Case) -> float:
    """Seconds of the loss's gradient of one batch, by plain PyTorch."""
    spans = []
    for batch in case.data[:5]:
        begun = now()
        case.loss(batch).backward()  # type: ignore[no-untyped-call]
        spans.append(now() - begun)
        case.model.zero_grad()
    return statistics.median(spans[1:])


def peer_seconds(case: Case) -> float | str:
    """Seconds of curvlinops' whole collection of the same layers; a sentence where it could not be run."""
    try:
        from curvlinops import KFACLinearOperator  # noqa: PLC0415 - it may be absent
    except ImportError as error:
        return f"curvlinops could not be imported: {error}"
    terms = case.data[0][1].shape[-1] - 1 if case.task == "causal_lm" else 1
    model = _Outputs(case.model)
    labelled = [
        (inputs, targets[:, 1:].flatten() if case.task == "causal_lm" else targets) for inputs, targets in case.data
    ]
    spans = []
    for _ in range(2):
        begun = now()
        operator = KFACLinearOperator(
            model,
            nn.CrossEntropyLoss(reduction="sum"),
            [parameter for parameter in case.model.parameters() if parameter.requires_grad],
            labelled,
            check_deterministic=False,
            fisher_type="empirical",
            kfac_approx="expand",
            num_per_example_loss_terms=terms,
            num_data=sum(len(targets) for _, targets in case.data),
            separate_weight_and_bias=False,
            batch_size_fn=lambda inputs: len(inputs if isinstance(inputs, Tensor) else next(iter(inputs.values()))),
        )
        operator.compute_kronecker_factors()
        spans.append(now() - begun)
        del operator
    return spans[-1]


class _Outputs(nn.Module):
    """The model with its outputs arranged as (terms, numbers)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Any) -> Tensor:  # noqa: ANN401 - a tensor, or a mapping of them
        """Logits, one row a loss term."""
        if isinstance(inputs, Tensor):
            return self.model(inputs)  # type: ignore[no-any-return]
        return self.model(**inputs).logits[:, :-1].flatten(0, 1)  # type: ignore[no-any-return]


def whole_job(case: Case, name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The claims and figures of one case: warm, the check on and off, beside a gradient and the peer."""
    collected(case, "growing")
    checked, unchecked = collected(case, "growing"), collected(case, "off")
    gradient, peer = gradient_seconds(case), peer_seconds(case)
    figures = {"checked": checked, "unchecked": unchecked, "gradient_seconds": gradient, "curvlinops_seconds": peer}
    together = BATCHES * checked["batch_seconds"]
    over_gradient = HEAD_OVER_GRADIENT if name.endswith("with head") else OVER_GRADIENT
    claims = [
        results_file.claim(f"{name}: a batch over one gradient", unchecked["batch_seconds"] / gradient, over_gradient),
        results_file.claim(f"{name}: a whole job over its batches", checked["whole_seconds"] / together, OVER_BATCHES),
        results_file.not_measured(f"{name}: a whole job over curvlinops'", OVER_PEER, peer)
        if isinstance(peer, str)
        else results_file.claim(f"{name}: a whole job over curvlinops'", checked["whole_seconds"] / peer, OVER_PEER),
    ]
    if DEVICE.type == "cuda":
        off = abs(checked["peak_bytes"] / checked["planned_bytes"] - 1)
        claims.append(results_file.claim(f"{name}: peak beside the plan, relative difference", off, OFF_PLAN))
    return claims, figures


def decompositions() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Seconds and bytes of the first solver of each size."""
    claims, figures = [], {}
    for size in (1024, 3000, 8192) if DEVICE.type == "cuda" else (128,):
        matrix = torch.randn(size, size, device=DEVICE)
        matrix = matrix @ matrix.T
        for need in ("values", "vectors"):
            for single in (False, True):
                solver = solvers(size, need, DEVICE, torch.float32, single=single)[0]  # type: ignore[arg-type]
                solver.solve(matrix)
                _begin_peak()
                before, begun = (torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0), now()
                solver.solve(matrix)
                seconds, held = now() - begun, _peak() - before
                name = f"{solver.cost.name} {need} {size}"
                planned = solver.cost.device_bytes
                figures[name] = {"seconds": seconds, "held_bytes": held, "planned_bytes": planned}
                if planned:
                    claims.append(results_file.claim(f"{name}: held over planned bytes", held / planned, 1.0))
    return claims, figures


SECTIONS: dict[str, Callable[[], tuple[list[dict[str, Any]], dict[str, Any]]]] = {
    "gpt2_without_head": lambda: whole_job(decoder(head=False), "GPT-2 without head"),
    "mlp": lambda: whole_job(perceptron(), "MLP"),
    "eigh": decompositions,
    "gpt2_with_head": lambda: whole_job(decoder(head=True), "GPT-2 with head"),
}


def main() -> None:
    """Measure section by section, and store the result after each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--output", default="device")
    parser.add_argument("--add", action="store_true", help="add to what other sections of this commit have stored")
    options = parser.parse_args()
    claims, figures = results_file.read(options.output) if options.add else ([], {})
    figures["machine"] = _machine()
    for name in options.sections:
        torch.manual_seed(0)
        more, figures[name] = SECTIONS[name]()
        claims += more
        results_file.write(options.output, claims, figures)
        gc.collect()


def _machine() -> dict[str, Any]:
    if DEVICE.type == "cpu":
        return {"device": "cpu"}
    properties = torch.cuda.get_device_properties(DEVICE)
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


if __name__ == "__main__":
    main()
