"""The variance of factors over batches is that of each batch's own factors, taken together by numpy in float64."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from catalog.requests.memory import Memory
from catalog.requests.woodbury import Woodbury
from engine.accumulation.batch_variance import BatchVariance
from engine.collect import collect_or_read
from engine.collection import checkpoints, data_pass, run_passes
from engine.errors import StopRequested
from engine.factors.factor_set import FactorSet, LayerFacts
from engine.factors.kronecker_factors import digest
from engine.memory.plan import Chosen
from engine.workspace import Workspace
from tests.oracles import MemoryArtifacts, workspace

BATCH = 4
EXAMPLES = 22
"""Five batches and a half: the last one weighs less."""
IN_TWO_PASSES = (("table", "norm", "q", "k"), ("conv", "head"))


class Net(nn.Module):
    """An embedding, a shared input, a block, groups, and padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.q, self.k = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.conv = nn.Conv1d(6, 4, 3, padding=1, groups=2)
        self.head = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.norm(self.table(ids))
        h = torch.tanh(self.q(h) * self.k(h))
        return self.head(torch.tanh(self.conv(h.transpose(1, 2))).mean(2))


def space(examples: int = EXAMPLES, *, policy: Any = "dense", **options: Any) -> Workspace:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 11, (EXAMPLES, 5), generator=generator)
    classes = torch.randint(0, 3, (EXAMPLES,), generator=generator)
    settings = {"batch_size": BATCH, "batch_variance": True, "self_check": "first"} | options
    made = workspace(Net(), [(ids[:examples], classes[:examples])], "classification", **settings)
    made.inputs.examples = examples
    made.options.woodbury = Woodbury(policy=policy)
    return made


@functools.cache
def undisturbed() -> FactorSet:
    """The collection by the options above, once for all tests that compare with it."""
    return collect_or_read(space())


def factors(whole: FactorSet) -> list[tuple[np.ndarray, np.ndarray]]:
    loaded = [whole.load(layer.ordinal) for layer in whole.layers]
    return [(each.A.double().numpy(), each.G.double().numpy()) for each in loaded]  # type: ignore[union-attr]


def figures(layer: LayerFacts) -> tuple[float | None, ...]:
    return (
        layer.relative_variance_A,
        layer.relative_standard_error_A,
        layer.relative_variance_G,
        layer.relative_standard_error_G,
    )


def expected(batches: list[np.ndarray], weights: list[float], decay: float = 1.0) -> tuple[float, float]:
    """Relative variance and standard error of a mean of ``batches``, where one of w has the variance σ²/w."""
    own = np.array(weights, dtype=np.float64)
    counted = own * decay ** np.arange(len(own) - 1, -1, -1)
    stack = np.stack(batches).reshape(len(batches), -1)
    mean = np.average(stack, axis=0, weights=counted)
    shares = counted / counted.sum()
    # E Σ c ‖A_b − A‖² = σ² Σ c (1/w − Σ share²/w), and A has the variance σ² Σ share²/w
    of_mean = float((shares**2 / own).sum())
    squares = float((counted * ((stack - mean) ** 2).sum(1)).sum())
    unit = squares / float((counted * (1 / own - of_mean)).sum()) / float((mean**2).sum())
    return unit * float((shares / own).sum()), float(np.sqrt(unit * of_mean))


def apart(examples: int, options: dict[str, Any]) -> tuple[list[list[tuple[np.ndarray, np.ndarray]]], list[int]]:
    """Each batch's own factors, of jobs over ever more examples without the option: ``N A(N) − M A(M)``."""
    plain = {**options, "batch_variance": False}
    found: list[list[tuple[np.ndarray, np.ndarray]]] = []
    sizes: list[int] = []
    before: list[tuple[np.ndarray, np.ndarray]] | None = None
    read = 0
    for number, start in enumerate(range(0, examples, BATCH)):
        stop = min(start + BATCH, examples)
        if number % options.get("update_freq", 1):
            continue
        size, done = stop - start, read
        read += size
        now = factors(collect_or_read(space(stop, **plain)))
        before = before or [(0 * A, 0 * G) for A, G in now]
        found.append(
            [
                tuple((read * own - done * past) / size for own, past in zip(*sides, strict=True))  # type: ignore[misc]
                for sides in zip(now, before, strict=True)
            ]
        )
        sizes.append(size)
        before = now
    return found, sizes


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize(
    "options",
    [
        {"fisher": "type2"},
        {"fisher": "mc", "samples": 2},
        {"fisher": "empirical", "sharing": "reduce"},
        {"fisher": "mc", "update_freq": 2},
    ],
)
def test_it_is_that_of_the_factors_of_each_batch(options: dict[str, Any]) -> None:
    whole = collect_or_read(space(**options))
    batches, sizes = apart(EXAMPLES, options)
    assert len(whole.layers) == 7
    for place, layer in enumerate(whole.layers):
        truth = [expected([batch[place][side] for batch in batches], sizes) for side in (0, 1)]
        if layer.form == "block":
            assert (layer.relative_variance_A, layer.no_batch_variance) == (None, "A: A is 1 in this form")
            assert figures(layer)[2:] == pytest.approx(truth[1], rel=1e-10)
        else:
            assert layer.no_batch_variance is None
            assert figures(layer) == pytest.approx((*truth[0], *truth[1]), rel=1e-10), layer.name


class Plain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def batches_of(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    draws = [(torch.randn(size, 5, generator=generator, dtype=torch.float64), size) for size in sizes]
    return [(x, torch.randint(0, 3, (size,), generator=generator)) for x, size in draws]


def plain(sizes: list[int], **options: Any) -> Workspace:
    torch.manual_seed(0)
    settings = {"fisher": "empirical", "batch_size": BATCH, "batch_variance": True} | options
    made = workspace(Plain().double(), batches_of(sizes), "classification", **settings)
    made.inputs.examples = sum(sizes)
    made.options.woodbury = Woodbury(policy="dense")
    return made


def hooked(model: nn.Module, chunks: list[tuple[Tensor, Tensor]]) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """A and G of each chunk and linear layer, by plain hooks and autograd."""
    found = []
    for x, y in chunks:
        met: dict[nn.Module, list[Tensor]] = {}

        def keep(module: nn.Module, given: Any, out: Tensor, met: dict[nn.Module, list[Tensor]] = met) -> None:
            met[module] = [*given, out]

        linear = [each for each in model.modules() if isinstance(each, nn.Linear)]
        hooks = [each.register_forward_hook(keep) for each in linear]
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        sides = []
        for entered, left in met.values():
            (gradient,) = torch.autograd.grad(loss, left, retain_graph=True)
            ones = torch.cat([entered, torch.ones(len(entered), 1, dtype=entered.dtype)], 1).detach()
            sides.append(tuple((each.T @ each / len(each)).numpy() for each in (ones, gradient)))
        found.append(sides)
        for hook in hooks:
            hook.remove()
    return found  # type: ignore[return-value]


@pytest.mark.part(of=32, by=("decay",))
@pytest.mark.parametrize("sizes", [[4] * 8, [4, 4, 4, 4, 4, 1]])
@pytest.mark.parametrize("decay", [None, 0.7])
def test_plain_hooks_give_the_same(sizes: list[int], decay: float | None) -> None:
    made = plain(sizes, ema_decay=decay)
    batches = hooked(made.inputs.model, batches_of(sizes))  # type: ignore[arg-type]
    whole = collect_or_read(made)
    for place, layer in enumerate(whole.layers):
        own = [[batch[place][side] for batch in batches] for side in (0, 1)]
        truth = [expected(each, [float(size) for size in sizes], decay or 1.0) for each in own]
        assert figures(layer) == pytest.approx((*truth[0], *truth[1]), rel=1e-10)
        if decay is None and len(set(sizes)) == 1:
            for each, variance in zip(own, (layer.relative_variance_A, layer.relative_variance_G), strict=True):
                stack = np.stack(each)
                assert variance == pytest.approx(
                    np.var(stack, axis=0, ddof=1).sum() / (stack.mean(0) ** 2).sum(), rel=1e-10
                )


def test_a_small_variance_beside_a_large_mean_keeps_its_digits() -> None:
    """In float32, where differences of running sums would have lost it."""
    rows = [torch.full((1, 3), 1000.0) + 0.01 * torch.randn(1, 3, generator=torch.Generator().manual_seed(n))
            for n in range(400)]  # fmt: skip
    sums, weight = torch.zeros(3), 0.0
    found = BatchVariance.of(sums)
    for row in rows:
        found.begin_(sums, weight)
        sums += row[0]
        weight += 1
        found.end_(sums, weight)
    found.end_pass_(sums, weight)
    truth, _ = expected([row.double().numpy() for row in rows], [1.0] * len(rows))
    assert found.relative(0, None).variance == pytest.approx(truth, rel=1e-2)


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        ({"fisher": "forward_only"}, {"G: `forward_only` sets G to the identity"}),
        ({"policy": "all"}, {"G: no sum of it is made (woodbury); `woodbury.policy: dense` makes one"}),
        (
            {"examples": 3},
            {"A: one batch entered, and two are needed; G: one batch entered, and two are needed"},
        ),
        ({}, {None}),
    ],
)
def test_what_cannot_be_had_is_null_with_its_reason(options: dict[str, Any], reasons: set[str | None]) -> None:
    whole = collect_or_read(space(**options))
    layers = [layer for layer in whole.layers if layer.form != "block"]
    assert {layer.no_batch_variance for layer in layers} == reasons
    for layer in whole.layers:
        for side, value in zip("AAGG", figures(layer), strict=True):
            assert (value is None) == (f"{side}: " in (layer.no_batch_variance or ""))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(ids))).mean(1)


def test_a_tied_head_says_why_it_has_none() -> None:
    ids = torch.randint(0, 9, (12, 5), generator=torch.Generator().manual_seed(0))
    (layer,) = collect_or_read(workspace(Tied(), [(ids, ids[:, 0])], "classification", batch_variance=True)).layers
    assert figures(layer) == (None,) * 4
    why = "A and G are those of the product nearest to the sum of two"
    assert layer.no_batch_variance == f"A: {why}; G: {why}"


class Sometimes(nn.Module):
    """A linear layer that half of the batches never call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late = nn.Linear(5, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.head(torch.tanh(self.late(h)) if float(x[0, 0]) > 0 else h)


def test_a_batch_without_a_call_has_no_factor_of_inputs_and_a_zero_one_of_gradients() -> None:
    chunks = batches_of([4] * 6)
    for number, (x, _) in enumerate(chunks):
        x[0, 0] = x[0, 0].abs() * (1 if number % 2 == 0 else -1)
    torch.manual_seed(0)
    model = Sometimes().double()
    made = workspace(model, chunks, "classification", fisher="empirical", batch_variance=True, self_check="off")
    made.options.woodbury = Woodbury(policy="dense")
    met = hooked(model, [chunk for chunk in chunks if float(chunk[0][0, 0]) > 0])
    called = [sides[1] for sides in met]
    (layer,) = [each for each in collect_or_read(made).layers if each.name == "late"]
    zero = 0 * called[0][1]
    gradients = [each for own in called for each in (own[1], zero)]
    truth = [*expected([own[0] for own in called], [4.0] * 3), *expected(gradients, [4.0] * 6)]
    assert figures(layer) == pytest.approx(truth, rel=1e-10)


def test_factors_are_those_without_it_but_for_rounding() -> None:
    """Nor does what is kept of smaller sizes differ."""
    with_it, without = (collect_or_read(space(nested=True, batch_variance=asked)) for asked in (True, False))
    for layer in without.layers:
        assert figures(layer) == (None,) * 4
        assert layer.no_batch_variance is None
    for load, plain_load in [(with_it.load, without.load)] + [
        (one.load, other.load) for one, other in zip(with_it.nested, without.nested, strict=True)
    ]:
        for layer in without.layers:
            one, other = load(layer.ordinal), plain_load(layer.ordinal)
            assert torch.allclose(one.A, other.A, rtol=1e-13, atol=1e-16)
            assert torch.allclose(one.G, other.G, rtol=1e-13, atol=1e-16)  # type: ignore[arg-type]


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_slices_of_a_batch_are_one_batch(micro_batch: int) -> None:
    sliced = space()
    sliced.options.memory = Memory(micro_batch=micro_batch)
    for one, other in zip(collect_or_read(sliced).layers, undisturbed().layers, strict=True):
        assert [each for each in figures(one) if each is not None] == pytest.approx(
            [each for each in figures(other) if each is not None], rel=1e-10
        )


def test_a_batch_that_is_halved_for_want_of_memory_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real, attempts = run_passes.run_pass, 0

    def fails_twice(*arguments: Any) -> Any:
        nonlocal attempts
        attempts += 1
        if attempts > 2:
            return real(*arguments)
        seen = 0

        def failing(job: Any, batch: Any, collector: Any, summed: Any) -> int:
            nonlocal seen
            seen += 1
            if seen == 3:
                # after its first example has entered
                for each in list(batch.slices(1))[:1]:
                    data_pass._enter(job, each, collector, summed)
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 96 bytes")
            return true_update(job, batch, collector, summed)

        with monkeypatch.context() as patch:
            patch.setattr(data_pass, "update", failing)
            return real(*arguments)

    true_update = data_pass.update
    monkeypatch.setattr(run_passes, "run_pass", fails_twice)
    halved = collect_or_read(space())
    assert (halved.micro_batch, attempts) == (2, 3)
    monkeypatch.undo()
    sliced = space()
    sliced.options.memory = Memory(micro_batch=2)
    assert [figures(layer) for layer in halved.layers] == [figures(layer) for layer in collect_or_read(sliced).layers]


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.8, "fisher": "mc"}, {"nested": True, "update_freq": 2}])
@pytest.mark.parametrize(
    ("parts", "stop_at"),
    # one pass has six batches, so the ninth is in the second of two
    [(None, 3), (None, 5), (IN_TWO_PASSES, 3), (IN_TWO_PASSES, 5), (IN_TWO_PASSES, 9)],
)
def test_a_resumed_collection_has_the_same_bits(
    options: dict[str, Any], parts: Any, stop_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_SHARE", 0)

    def made(scratch: MemoryArtifacts, stop: Callable[[], None] = lambda: None) -> Workspace:
        found = space(**options)
        found.ports.scratch, found.resume.checkpoint_seconds, found.ports.raise_if_cancelled = scratch, 1e-9, stop
        found.resume.chosen = None if parts is None else Chosen(parts=parts)
        return found

    asked = 0

    def stop() -> None:
        nonlocal asked
        asked += 1
        if asked == stop_at:
            raise StopRequested

    truth = collect_or_read(made(MemoryArtifacts()))
    scratch = MemoryArtifacts()
    with pytest.raises(StopRequested):
        collect_or_read(made(scratch, stop))
    lines: list[str] = []
    again = made(scratch)
    again.ports.log = lambda _, line: lines.append(line)
    whole = collect_or_read(again)
    assert any(line.startswith("collection resumed") for line in lines)
    assert whole.layers == truth.layers
    for layer in truth.layers:
        one, other = whole.load(layer.ordinal), truth.load(layer.ordinal)
        assert (digest(one.A), digest(one.G)) == (digest(other.A), digest(other.G))


def test_a_checkpoint_of_an_earlier_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_SHARE", 0)
    scratch, lines = MemoryArtifacts(), []
    for number, name in enumerate((2, checkpoints._VERSION)):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "_VERSION", name)
            made = space()
            made.ports.scratch, made.resume.checkpoint_seconds = scratch, 1e-9
            if number:
                made.ports.log = lambda _, line: lines.append(line)
            collect_or_read(made)
    assert "the checkpoint of an earlier attempt is discarded: it is of another format" in lines


def test_sums_on_the_host_have_the_same_variance() -> None:
    away = space()
    away.resume.chosen = Chosen(parts=(("table", "norm", "q", "k", "conv", "head"),), offload=True)
    for one, other in zip(collect_or_read(away).layers, undisturbed().layers, strict=True):
        assert [each or 0.0 for each in figures(one)] == pytest.approx([each or 0.0 for each in figures(other)])


@pytest.mark.parametrize("fisher", ["type2", "forward_only"])
def test_the_plan_counts_what_is_set_aside(fisher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    real = data_pass.update

    def counting(job: Any, batch: Any, collector: Any, summed: Any) -> int:
        tensors = [
            tensor
            for each in collector.statistics
            for tensor in (each.A, each.G, each.variance_A.before, each.variance_G.before)
            if tensor is not None
        ]
        held.append(sum(tensor.nbytes for tensor in tensors))
        return real(job, batch, collector, summed)

    monkeypatch.setattr(data_pass, "update", counting)
    plans: list[Any] = []
    for asked in (True, False):
        made = space(fisher=fisher, batch_variance=asked)
        made.ports.announce_plan = plans.append
        collect_or_read(made)
    counted = [next(term["size_bytes"] for term in plan["terms"] if term["name"] == "accumulators") for plan in plans]
    assert [held[0], held[-1]] == counted
    assert counted[0] > counted[1]
    seconds = [plan["stages"]["collection"]["seconds"] for plan in plans]
    assert seconds[0] > seconds[1]
