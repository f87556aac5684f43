"""The same numbers on a GPU as on a CPU, and the same again."""

import contextlib

import pytest
import torch
from torch import nn

from catalog.analyses.capacity import CapacityParams
from catalog.requests.inputs import Task
from catalog.requests.memory import Memory
from engine import collect
from engine.analyses.capacity import Capacity
from engine.analyses.factors import KeptFactors
from engine.collect import collect_or_read
from engine.collection import normalise
from engine.collection.pass_statistics import WITHOUT_CUDNN
from engine.errors import NonFiniteFactor
from engine.factors.kronecker_factors import digest
from engine.measurement.layer_measurement import Measured, measure_layers
from engine.measurement.stored_decompositions import DEVICE_ASKED, mark_device
from engine.memory.budget import MemoryBudget
from engine.memory.plan import DEVICE_LIBRARY_BYTES
from engine.workspace import Workspace
from kronoscope.local import measure
from tests.oracles import MemoryArtifacts, relative_error, workspace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Flatten(), nn.LayerNorm(384),
        nn.Linear(384, 10),
    )  # fmt: skip


def on(device: str, **options: object) -> Workspace:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(50, 1, 8, 8, generator=generator)
    y = torch.randint(0, 10, (50,), generator=generator)
    space = workspace(net(), [(x, y)], "classification", **({"batch_size": 16} | options))
    space.machine.device = torch.device(device)
    assert space.inputs.model is not None
    space.inputs.model = space.inputs.model.to(device)
    return space


@pytest.mark.parametrize("fisher", ["mc", "type2", "empirical", "forward_only"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_factors_equal_those_of_the_cpu(fisher: str, sharing: str) -> None:
    here, there = (collect_or_read(on(device, fisher=fisher, sharing=sharing)) for device in ("cpu", "cuda"))
    assert [layer.name for layer in there.layers] == [layer.name for layer in here.layers]
    for layer in here.layers:
        left, right = here.load(layer.ordinal), there.load(layer.ordinal)
        assert relative_error(right.A.cpu(), left.A) < 1e-11
        assert relative_error(right.G.cpu(), left.G) < 1e-11


@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
def test_recurrent_layers_equal_those_of_the_cpu(kind: str) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.recurrent, self.head = getattr(nn, kind)(5, 8, num_layers=2, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.recurrent(x)[0])

    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(12, 6, 5, generator=generator), torch.randint(0, 3, (12, 6), generator=generator)
    runs = []
    for device in ("cpu", "cuda"):
        space = workspace(Recurrent().to(device), [(x, y)], "classification", fisher="empirical", batch_size=4)
        space.machine.device = torch.device(device)
        runs.append(collect_or_read(space))
    here, there = runs
    assert [layer.name for layer in there.layers] == [layer.name for layer in here.layers]
    for left, right in zip(here.layers, there.layers, strict=True):
        assert relative_error(there.load(right.ordinal).A.cpu(), here.load(left.ordinal).A) < 1e-10
        assert relative_error(there.load(right.ordinal).G.cpu(), here.load(left.ordinal).G) < 1e-10
        assert right.exact_trace == pytest.approx(left.exact_trace, rel=1e-10)
        assert right.why.endswith(WITHOUT_CUDNN) == left.name.startswith("recurrent.")
        assert "cuDNN" not in left.why


def test_traces_and_corrections_equal_those_of_the_cpu() -> None:
    here, there = (collect_or_read(on(device, fisher="mc", ekfac=True)) for device in ("cpu", "cuda"))
    assert here.load_corrected is not None
    assert there.load_corrected is not None
    for left, right in zip(here.layers, there.layers, strict=True):
        assert right.exact_trace == pytest.approx(left.exact_trace, rel=1e-11)
        assert right.trace_standard_error == pytest.approx(left.trace_standard_error, rel=1e-9)
        corrected = there.load_corrected(right.ordinal)
        assert corrected.eigenvalues.device.type == "cpu"
        assert float(corrected.eigenvalues.sum()) == pytest.approx(right.exact_trace, rel=1e-11)
        # bases of a null space are anyone's, and what lies along them is zero in both
        largest = here.load_corrected(left.ordinal).eigenvalues.max()
        assert float(corrected.eigenvalues.max()) == pytest.approx(float(largest), rel=1e-8)


def test_traces_of_masked_tokens_equal_those_of_the_cpu() -> None:
    traces = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)).to(device)
        ids = torch.randint(0, 9, (6, 5))
        targets = torch.where(torch.rand(6, 5) < 0.3, -100, ids)
        space = workspace(model, [(ids, targets)], "masked_lm", fisher="mc")
        space.machine.device = torch.device(device)
        traces.append([layer.exact_trace for layer in collect_or_read(space).layers])
    assert traces[1] == pytest.approx(traces[0], rel=1e-11)


def test_embedding_and_tokens_on_the_device() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 9)).cuda()
    ids = torch.randint(0, 9, (6, 5))
    space = workspace(model, [(ids, ids)], "causal_lm", fisher="mc")
    space.machine.device = torch.device("cuda")
    whole = collect_or_read(space)
    counts = torch.bincount(ids[ids != 0], minlength=9).double()
    assert relative_error(whole.load(0).A.cpu(), counts / counts.sum()) < 1e-12


def test_tf32_rounds_the_rows_of_sums_and_nothing_else() -> None:
    """A and G of wide layers against float64: the bound of each entry, and more than float32's own error.

    On a card without units for it they are those in `ieee`, to the bit.
    """
    has_units = torch.cuda.get_device_capability() >= (8, 0)
    runs = {}
    narrow = {"dtype": "float32", "precision": "tf32"}
    for name, options in {"float64": {"dtype": "float64"}, "ieee": {"dtype": "float32"}, "tf32": narrow}.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 768), nn.Tanh(), nn.Linear(768, 256)).cuda()
        x, y = torch.randn(4096, 512), torch.randint(0, 256, (4096,))
        space = workspace(model, [(x, y)], "classification", fisher="empirical", batch_size=2048, **options)
        space.machine.device = torch.device("cuda")
        runs[name] = collect_or_read(space)
    assert not torch.backends.cuda.matmul.allow_tf32
    exact, wide, rounded = runs["float64"], runs["ieee"], runs["tf32"]
    assert [each.accumulation_precision for each in (exact, wide, rounded)] == [
        "ieee",
        "ieee",
        "tf32" if has_units else "ieee",
    ]
    assert not rounded.declared
    for facts, others in zip(wide.layers, rounded.layers, strict=True):
        assert others.exact_trace == pytest.approx(facts.exact_trace, rel=1e-6)
        left, right, truth = (each.load(facts.ordinal) for each in (wide, rounded, exact))
        for side in ("A", "G"):
            ieee, tf32, own = (getattr(each, side).cpu().double() for each in (left, right, truth))
            if not has_units:
                assert torch.equal(ieee, tf32)
                continue
            assert 10 * relative_error(ieee, own) < relative_error(tf32, own) < 2.0**-9
            allowed = (2.0**-9 + 1e-4) * (own.diagonal()[:, None] * own.diagonal()).sqrt()
            assert bool(((tf32 - own).abs() <= allowed).all())


def test_same_digests_twice_in_float32() -> None:
    runs = []
    for _ in range(2):
        space = on("cuda", fisher="mc", dtype="float32")
        space.options.kinds = ("factors",)
        runs.append([(row.record.digest_A, row.record.digest_G) for row in KeptFactors(None, space).rows()])
    assert runs[0] == runs[1]


@pytest.mark.parametrize(("amp", "kernel"), [("bf16", "Flash"), ("off", "Efficient")])
def test_fused_attention_is_taken_and_has_the_same_digests_twice(amp: str, kernel: str) -> None:
    taken: set[str] = set()

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.packed, self.head = nn.Embedding(50, 64), nn.Linear(64, 192), nn.Linear(64, 50)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            query, key, value = self.packed(self.table(ids)).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            if mixed.is_cuda and mixed.grad_fn is not None:
                taken.add(mixed.grad_fn.name())
            return self.head(mixed.transpose(1, 2).flatten(2))

    # long enough that several blocks of keys add to one query's gradient
    ids = torch.randint(0, 50, (8, 1024), generator=torch.Generator().manual_seed(1))
    runs = []
    for _ in range(2):
        options = {"fisher": "empirical", "batch_size": 4, "dtype": "float32", "amp": amp, "self_check": "off"}
        space = workspace(Attending().cuda(), [(ids, ids)], "token_classification", **options)
        space.machine.device, space.options.kinds = torch.device("cuda"), ("factors",)
        rows = list(KeptFactors(None, space).rows())
        assert {row.record.nondeterministic for row in rows} == {()}
        runs.append([(row.layer, row.record.digest_A, row.record.digest_G) for row in rows])
    assert len(runs[0]) == 3
    assert runs[0] == runs[1]
    assert taken == {f"ScaledDotProduct{kernel}AttentionBackward0"}


def test_capacity_on_the_device_records_its_rungs_and_bytes() -> None:
    rows = list(Capacity(CapacityParams(), on("cuda", fisher="mc")).rows())
    assert rows[0].record.rungs_A == ("device_float64",)
    assert rows[0].observed.reserved_after_bytes
    assert rows[0].metrics.effective_dimension > 0


def test_device_budget_is_measured() -> None:
    budget = MemoryBudget.measure(Memory(device=0.5), torch.device("cuda"))
    free, _ = torch.cuda.mem_get_info()
    assert budget.device_bytes == pytest.approx(free / 2, rel=0.1)


def test_model_stays_on_its_device() -> None:
    space = on("cuda", fisher="mc", dtype="float64")
    assert space.inputs.model is not None
    collect_or_read(space)
    assert {parameter.device.type for parameter in space.inputs.model.parameters()} == {"cuda"}
    assert {parameter.dtype for parameter in space.inputs.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("fisher", ["mc", "type2", "empirical"])
def test_weighted_and_smoothed_losses_equal_those_of_the_cpu(fisher: str) -> None:
    task = Task(type="classification", class_weights=tuple(range(10)), label_smoothing=0.2)
    here, there = (on(device, fisher=fisher) for device in ("cpu", "cuda"))
    here.inputs.task = there.inputs.task = task
    left, right = collect_or_read(here), collect_or_read(there)
    for layer in left.layers:
        one, other = left.load(layer.ordinal), right.load(layer.ordinal)
        assert relative_error(other.G.cpu(), one.G) < 1e-11


def test_nested_sizes_are_runs_over_the_first_examples() -> None:
    whole = collect_or_read(on("cuda", fisher="mc", nested=True, dtype="float32", batch_size=5))
    assert [size.examples for size in whole.nested] == [10, 15, 25]
    alone = on("cuda", fisher="mc", dtype="float32", batch_size=5)
    chunk = next(iter(alone.inputs.batches())) if alone.inputs.batches is not None else ()
    alone.inputs.batches = lambda: iter([tuple(part[:25] for part in chunk)])
    first = collect_or_read(alone)
    for layer in first.layers:
        one, other = whole.nested[2].load(layer.ordinal), first.load(layer.ordinal)
        assert (digest(one.A), digest(one.G)) == (digest(other.A), digest(other.G))


def test_a_number_that_is_not_finite_is_noticed_at_its_batch() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(50, 4), torch.randint(0, 3, (50,))
    x[31] = 1e25  # a tanh bears it, its square does not
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).cuda()
    space = workspace(model, [(x, y)], "classification", fisher="mc", dtype="float32", batch_size=5)
    space.machine.device = torch.device("cuda")
    with pytest.raises(NonFiniteFactor, match=r"`0`: .* after batch 6 \(examples 30 to 34\)"):
        collect_or_read(space)


def test_a_tied_head_and_a_shared_table_of_positions_equal_those_of_the_cpu() -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.positions, self.inner = nn.Embedding(40, 8), nn.Embedding(6, 8), nn.Linear(8, 8)
            self.head = nn.Linear(8, 40)
            self.head.weight = self.table.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            places = torch.arange(ids.shape[1], device=ids.device)
            return self.head(torch.tanh(self.inner(self.table(ids) + self.positions(places))))

    ids = torch.randint(0, 40, (10, 6), generator=torch.Generator().manual_seed(2))
    runs = []
    for device in ("cpu", "cuda"):
        space = workspace(Language().to(device), [(ids, ids)], "causal_lm", fisher="mc", min_coverage=1.0)
        space.machine.device = torch.device(device)
        runs.append(collect_or_read(space))
    here, there = runs
    assert [layer.why for layer in there.layers] == [layer.why for layer in here.layers]
    for layer in here.layers:
        assert relative_error(there.load(layer.ordinal).A.cpu(), here.load(layer.ordinal).A) < 1e-11
        assert relative_error(there.load(layer.ordinal).G.cpu(), here.load(layer.ordinal).G) < 1e-11


@pytest.mark.parametrize("fisher", ["mc", "type2"])
def test_offloaded_sums_equal_resident_ones(fisher: str) -> None:
    whole, moved = on("cuda", fisher=fisher), on("cuda", fisher=fisher)
    moved.options.memory = Memory(offload="on", micro_batch=5)
    here, there = collect_or_read(whole), collect_or_read(moved)
    for layer in here.layers:
        left, right = here.load(layer.ordinal), there.load(layer.ordinal)
        assert left.A.device.type == left.G.device.type == "cpu"
        assert relative_error(right.A, left.A) < 1e-11
        assert relative_error(right.G, left.G) < 1e-11


def warm_up_device() -> None:
    """Let cuBLAS take its workspaces, of which the backward pass's thread has its own: they are none of a test's."""
    left = torch.eye(64, device="cuda", requires_grad=True)
    (left @ left).sum().backward()
    torch.linalg.eigvalsh(left.detach().double())
    torch.cuda.synchronize()


def test_sums_leave_a_device_that_is_too_small_for_them() -> None:
    torch.manual_seed(0)
    warm_up_device()
    model = nn.Sequential(*[nn.Linear(1500, 1500) for _ in range(8)]).cuda()
    x = torch.randn(8, 1500)
    space = workspace(model, [(x, x)], "regression", fisher="mc", dtype="float32", batch_size=8)
    space.machine.device = torch.device("cuda")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    # eight layers' sums take 144 MB; the eigenvalues of one take 54 MB in float64
    device_bytes = weights + DEVICE_LIBRARY_BYTES + 100 * 2**20
    space.machine.budget = MemoryBudget(device_bytes=device_bytes, host_bytes=2**40)
    plans = []
    space.ports.announce_plan = plans.append
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    whole = collect_or_read(space)
    assert plans[0]["offload"]
    assert whole.passes == 1
    assert torch.cuda.max_memory_allocated() - before < 100 * 2**20
    assert torch.cuda.memory_allocated() - before < 2**20


@pytest.mark.parametrize("storage", [None, "float16"])
def test_factors_that_leave_once_are_those_that_leave_at_once(
    monkeypatch: pytest.MonkeyPatch, storage: str | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(32, 300, generator=generator).cuda(), torch.arange(32).cuda() % 700)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 20), nn.Tanh(), nn.Linear(20, 700), nn.LayerNorm(700)).cuda()
    options = {"fisher": "empirical", "dtype": "float32", "storage_dtype": storage}
    once = measure(model, data, task="classification", kinds=("factors",), collection=options)
    # rows in place of a G of 700 by 700, and dense ones
    assert {layer.representation_G for layer in once.factors.collected.layers} == {"dense", "woodbury"}
    monkeypatch.setattr(normalise, "leaves_once", lambda _: False)
    monkeypatch.setattr(collect, "leaves_once", lambda _: False)
    assert measure(model, data, task="classification", kinds=("factors",), collection=options).index == once.index


def test_where_an_attempt_ended_on_the_device_the_next_decomposes_on_the_host() -> None:
    scratch = MemoryArtifacts()

    def attempt() -> dict[str, Measured]:
        made = on("cuda")
        made.ports.scratch = scratch
        return {layer.facts.name: layer for layer in measure_layers(made)}

    first = attempt()
    assert first["5"].record.rungs_G == ("device_float64",)
    assert not [name for name in scratch.tables if name.endswith(DEVICE_ASKED)]
    side = first["5"].G
    with contextlib.suppress(RuntimeError), mark_device(scratch, f"bases/{side.digest}-{side.rank_bound}", "it"):
        raise RuntimeError("CUDA error: unspecified launch failure")
    second = attempt()
    assert second["5"].record.rungs_G == ("host_float64",)
    assert second["5"].record.rungs_A == ("device_float64",)
    known, found = first["5"].G.spectrum, second["5"].G.spectrum
    assert known is not None
    assert found is not None
    assert torch.allclose(found, known, rtol=1e-9, atol=1e-15)
