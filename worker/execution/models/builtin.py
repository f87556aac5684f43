"""The builtin models: small ones whose weights come with the package, others trained here once into the model store.

Training has a fixed seed, but sums are rounded otherwise on another processor, so its result differs from machine to
machine; weights in the package are the same everywhere.

``python -P -m worker.execution.models.builtin tiny_gpt --store DIR`` trains one ahead of time;
``… digits_cnn --package worker/execution/models/trained`` trains one of the package anew.
"""

import argparse
import contextlib
import hashlib
import json
import os
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from catalog.requests.inputs import BuiltinModel, Task
from engine.collection.nan_check import require_known_labels
from engine.model.batches import make_batches
from engine.model.outputs import predict
from worker.execution.data.builtin import TEST_EXAMPLES, digits, english_bytes
from worker.execution.data.stream import DataStream
from worker.execution.loaded_model import LoadedModel, Vocabulary
from worker.execution.loader_context import LoaderContext

BYTES = 256
CONTEXT = 64
"""Positions of `tiny_gpt`."""
PACKAGED = Path(__file__).parent / "trained"
_FOLDER = "builtin"
_RECIPE = 1
"""Raised when an architecture or its training changes, so that no older file is taken for it."""
_SEED = 20_240_601
_STEPS = {"digits_cnn": 600, "digits_mlp": 1000, "tiny_gpt": 220}
_BATCH = {"digits_cnn": 64, "digits_mlp": 64, "tiny_gpt": 24}
_LEARNING_RATE = {"digits_cnn": 5e-3, "digits_mlp": 5e-3, "tiny_gpt": 3e-3}


def digits_cnn() -> nn.Module:
    """Two convolutions with batch normalisation and a linear head on 8×8 images."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 16, 3, padding=1),
            norm1=nn.BatchNorm2d(16),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(16, 32, 3, padding=1),
            norm2=nn.BatchNorm2d(32),
            relu2=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            head=nn.Linear(32 * 4 * 4, 10),
        )
    )


def digits_mlp() -> nn.Module:
    """Two hidden layers of 64."""
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            hidden1=nn.Linear(64, 64),
            tanh1=nn.Tanh(),
            hidden2=nn.Linear(64, 64),
            tanh2=nn.Tanh(),
            head=nn.Linear(64, 10),
        )
    )


class _Block(nn.Module):
    """Causal attention and an MLP, each after a LayerNorm, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:  # (B, T, width)
        batch, length, width = hidden.shape
        normed = self.norm_attention(hidden)
        split = (batch, length, self.heads, width // self.heads)
        query, key, value = (part(normed).view(split).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        widened: Tensor = self.narrow(nn.functional.gelu(self.widen(self.norm_mlp(hidden))))
        return hidden + widened


class TinyGPT(nn.Module):
    """A byte-level GPT: 4 blocks, 64 wide."""

    def __init__(self, width: int = 64, heads: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:  # (B, T) byte values -> (B, T, 256)
        """Return logits (B, T, 256) of the next byte at every position of byte values, int64, T at most 64."""
        # one row of positions per example: the rows' gradients must not arrive summed over the batch
        places = torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
        hidden = self.tokens(input_ids) + self.positions(places)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


ARCHITECTURES = {"digits_cnn": digits_cnn, "digits_mlp": digits_mlp, "tiny_gpt": TinyGPT}


def load(source: BuiltinModel, task: Task, context: LoaderContext) -> LoadedModel:  # noqa: ARG001 - as every loader
    """Load a builtin model from the package or the store, or train it now and store it."""
    vocabulary = Vocabulary(size=BYTES, max_length=CONTEXT, tokenizer=None) if source.name == "tiny_gpt" else None
    if context.shapes_only:
        with torch.device("meta"):
            bare = ARCHITECTURES[source.name]()
        return LoadedModel(model=bare.eval(), vocabulary=vocabulary, provenance=f"shapes of builtin {source.name}")
    model = ARCHITECTURES[source.name]()
    weights, measured = _found_weights(source.name, context.store)
    if weights is None:
        measured, digest = _train_into(context.store / _FOLDER, source.name, model, context)
    else:
        model.load_state_dict(safetensors.torch.load(weights))
        digest = hashlib.sha256(weights).hexdigest()
    model.eval()
    context.log("info", f"{source.name}: " + ", ".join(f"{name} {value:.4g}" for name, value in measured.items()))
    return LoadedModel(model=model, vocabulary=vocabulary, provenance=f"builtin {source.name} sha256:{digest}")


def untrained(name: str, store: Path) -> Callable[[], nn.Module] | None:
    """Return what makes a builtin model with random weights, if the model is still to be trained."""
    weights, _ = _found_weights(name, store)
    return ARCHITECTURES[name] if weights is None else None


def _found_weights(name: str, store: Path) -> tuple[bytes | None, dict[str, float]]:
    weights, measured = _stored_weights(name, PACKAGED)
    return (weights, measured) if weights is not None else _stored_weights(name, store / _FOLDER)


def _paths(name: str, folder: Path) -> tuple[Path, Path]:
    return folder / f"{name}-{_RECIPE}.safetensors", folder / f"{name}-{_RECIPE}.json"


def _stored_weights(name: str, folder: Path) -> tuple[bytes | None, dict[str, float]]:
    """The stored file's bytes, if they have the digest that was noted when they were written."""
    weights, note = _paths(name, folder)
    try:
        raw, noted = weights.read_bytes(), json.loads(note.read_text())
    except (FileNotFoundError, PermissionError, ValueError):
        # one that another job has kept to itself is trained anew, and replaced
        return None, {}
    if hashlib.sha256(raw).hexdigest() != noted["sha256"]:
        return None, {}
    return raw, noted["measured"]


def _train_into(folder: Path, name: str, model: nn.Module, context: LoaderContext) -> tuple[dict[str, float], str]:
    """Train and store a model; return how good it became, and the digest of its weights."""
    _train(name, model, context)
    measured = _measure(name, model)
    return measured, _store(name, model, folder, measured)


def _store(name: str, model: nn.Module, folder: Path, measured: dict[str, float]) -> str:
    weights, note = _paths(name, folder)
    with contextlib.suppress(PermissionError):
        weights.parent.mkdir(parents=True, exist_ok=True)
    raw = safetensors.torch.save({key: value.contiguous() for key, value in model.state_dict().items()})
    digest = hashlib.sha256(raw).hexdigest()
    if not os.access(weights.parent, os.W_OK):
        return digest  # a job with a user of its own: the service trains into the store
    # the note last: a reader that finds it finds the weights too
    for path, content in ((weights, raw), (note, json.dumps({"sha256": digest, "measured": measured}).encode())):
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), 0o644)  # for every job, whose users differ
            os.fsync(file.fileno())
        Path(file.name).replace(path)
    return digest


def _train(name: str, model: nn.Module, context: LoaderContext) -> None:
    """Train in place. One thread and one seed, whatever the job asked for: the same weights each time."""
    loss_of, examples = _training(name)
    threads = torch.get_num_threads()
    steps, batch = _STEPS[name], _BATCH[name]
    torch.set_num_threads(1)
    try:
        generator = torch.Generator().manual_seed(_SEED)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            for module in model.modules():
                reset = getattr(module, "reset_parameters", None)
                if reset is not None:
                    reset()
        optimiser = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE[name], weight_decay=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, _LEARNING_RATE[name], total_steps=steps)
        model.train()
        for step in range(steps):
            context.checkpoint()
            chosen = torch.randint(0, examples, (batch,), generator=generator)
            loss = loss_of(model, chosen)
            optimiser.zero_grad()
            torch.autograd.backward(loss)
            optimiser.step()
            schedule.step()
            context.report("model", step + 1, steps, "steps")
        optimiser.zero_grad(set_to_none=True)
    finally:
        torch.set_num_threads(threads)


def _training(name: str) -> tuple[Callable[[nn.Module, Tensor], Tensor], int]:
    """The loss on chosen training examples, and how many examples there are."""
    if name == "tiny_gpt":
        rows = english_bytes(CONTEXT + 1)
        return lambda model, chosen: _next_byte_loss(model, rows[chosen]), len(rows) - TEST_EXAMPLES
    images, classes = digits()
    loss = nn.functional.cross_entropy
    return lambda model, chosen: loss(model(images[chosen]), classes[chosen]), len(images) - TEST_EXAMPLES


def _next_byte_loss(model: nn.Module, rows: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def _measure(name: str, model: nn.Module) -> dict[str, float]:
    """How good it became, on examples it never saw."""
    model.eval()
    if name == "tiny_gpt":
        loss = _next_byte_loss(model, english_bytes(CONTEXT + 1)[-TEST_EXAMPLES:])
        return {"test_bits_per_byte": float(loss) / 0.6931471805599453}
    images, classes = digits()
    right = model(images[-TEST_EXAMPLES:]).argmax(1) == classes[-TEST_EXAMPLES:]
    return {"test_accuracy": float(right.double().mean())}


def main(arguments: list[str]) -> int:
    """Train one model into the store, or say that it is there; or anew into the package."""
    parser = argparse.ArgumentParser(prog="python -P -m worker.execution.models.builtin", description=__doc__)
    parser.add_argument("name", choices=sorted(ARCHITECTURES))
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--store", type=Path, help="folder of the model store")
    place.add_argument("--package", type=Path, help="folder of weights that come with the package")
    chosen = parser.parse_args(arguments)
    store = chosen.store or chosen.package
    say = LoaderContext(store=store, log=lambda _, message: print(message, flush=True), report=_report)  # noqa: T201 - a command
    began = time.monotonic()
    if chosen.package is not None:
        measured, digest = _train_into(chosen.package, chosen.name, ARCHITECTURES[chosen.name](), say)
        done = f"{measured}, sha256:{digest}"
    else:
        done = load(BuiltinModel(source="builtin", name=chosen.name), Task(type="classification"), say).provenance
    print(f"{done}, {time.monotonic() - began:.1f} s")  # noqa: T201 - a command speaks
    return 0


def _report(stage: str, done: int, total: int | None, unit: str) -> None:
    if total and (done == total or done % max(total // 10, 1) == 0):
        print(f"{stage}: {done}/{total} {unit}", flush=True)  # noqa: T201 - a command speaks


def try_untrained(make: Callable[[], nn.Module], data: DataStream, task: Task) -> None:
    """Run an untrained model on the first example, and compare the labels with its classes.

    Training takes seconds to half a minute, and no weight changes which inputs a model takes and which classes it has.
    Any other model is tried by the engine's dry run, before a pass over the data is made.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = make().eval()
        batch = next(make_batches(data.batches(), 1)).to(torch.device("cpu"), torch.float32)
        classes = predict(model, batch, task).outputs.shape[-1]
    require_known_labels(data.labels, classes, task)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
