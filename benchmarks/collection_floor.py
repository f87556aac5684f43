"""Collection against its floor: one forward, one backward without weight gradients, one triangle per factor.

Nothing can collect A and G of a batch for less. The floor runs the same model on the same
batches, keeps the same inputs and gradients, and multiplies them with BLAS's ``syrk``, which
computes one triangle; collection adds hooks, label sampling, its dry run and its full products.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from scipy.linalg import blas
from threadpoolctl import threadpool_limits
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from benchmarks import results_file
from catalog.collection import Collection
from catalog.inputs import Task
from engine.curvature.collection import collected
from engine.workspace import Workspace

BATCHES, EXAMPLES, TOKENS, RUNS = 4, 16, 128, 5


def encoder() -> nn.Module:
    """Six layers, 384 wide: the shape of MiniLM, with random weights (speed does not depend on them)."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, vocab_size=8192
    )
    model = BertModel(config, add_pooling_layer=False)
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.LayerNorm)):
            module.requires_grad_(requires_grad=False)
    return model.eval()


def batches() -> Iterator[tuple[Any, None]]:
    """The same token ids in every run."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(BATCHES):
        ids = torch.randint(0, 8192, (EXAMPLES, TOKENS), generator=generator)
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, None


def collect(model: nn.Module) -> None:
    """What is measured."""
    collected(
        Workspace(
            model=model,
            batches=batches,
            task=Task(type="sentence_embedding"),
            artifacts=None,  # type: ignore[arg-type] # nothing is written
            collection=Collection(batch_size=EXAMPLES),
        )
    )


def floor(model: nn.Module) -> None:
    """The same passes by hand, and one triangle of every factor; each shared input once."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    flags = [parameter.requires_grad for parameter in model.parameters()]
    model.requires_grad_(requires_grad=False)
    rows: list[Tensor] = []
    entered: set[int] = set()

    def watch(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if id(args[0]) not in entered:
            entered.add(id(args[0]))
            rows.append(args[0].detach())
        hooked = output if output.requires_grad else output.detach().requires_grad_()
        hooked.register_hook(rows.append)
        return None if hooked is output else hooked

    handles = [module.register_forward_hook(watch) for module in linears]
    for inputs, _ in batches():
        pooled = model(**inputs).last_hidden_state.mean(1)
        torch.autograd.backward(pooled, torch.randn_like(pooled))
        for matrix in rows:
            flat = matrix.reshape(-1, matrix.shape[-1]).numpy()
            blas.ssyrk(1.0, flat.T)
        rows.clear()
        entered.clear()
    for handle in handles:
        handle.remove()
    for parameter, flag in zip(model.parameters(), flags, strict=True):
        parameter.requires_grad_(flag)


def seconds(work: Callable[[nn.Module], None], model: nn.Module) -> float:
    """Processor seconds of one run: another load on the machine does not enter."""
    begun = time.process_time()
    work(model)
    return time.process_time() - begun


def main() -> None:
    """Measure both in turn, so that a drift of the machine meets both."""
    torch.set_num_threads(1)
    model = encoder()
    # scipy brings a BLAS of its own, whose waiting threads would count as work
    with threadpool_limits(1):
        seconds(floor, model)
        seconds(collect, model)
        pairs = [(seconds(collect, model), seconds(floor, model)) for _ in range(RUNS)]
    ratio = statistics.median(ours / least for ours, least in pairs)
    results_file.write(
        "collection_floor",
        [results_file.claim("CPU seconds of a collection over its floor, MiniLM-shaped encoder", ratio, 1.5)],
        {
            "unit": "CPU seconds",
            "batches": BATCHES,
            "examples": EXAMPLES,
            "tokens": TOKENS,
            "collection": [ours for ours, _ in pairs],
            "floor": [least for _, least in pairs],
        },
    )


if __name__ == "__main__":
    main()
