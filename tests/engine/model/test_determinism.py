"""What decides bits is held while measuring, restored afterwards, and said where it cannot be repeated."""

import json
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from engine.analyses.factors import KeptFactors
from engine.collect import collect_or_read
from engine.collection import checkpoints, pass_statistics
from engine.collection.pass_statistics import WITHOUT_CUDNN, instead_of_cudnn
from engine.errors import StopRequested
from engine.model.determinism import UNKNOWN, Numerics, hold_attention, leave_strict, set_numerics
from engine.workspace import Workspace
from tests.oracles import MemoryArtifacts, workspace

CUBLAS = (
    "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
    "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it uses CuBLAS"
)
FLASH = "Flash Attention defaults to a non-deterministic algorithm. To explicitly enable determinism call"
ROOT = Path(__file__).resolve().parents[3]
HERE = Numerics.here(torch.device("cpu"))


class Careless(nn.Module):
    """Takes an operation without a deterministic form in its first batch only, and warns of something else."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if bool((x[:, 0] == 7).any()):
            x = x.put(torch.tensor([0]), torch.tensor([7.0]).to(x.dtype))
        warnings.warn("the model's own affair", DeprecationWarning, stacklevel=1)
        assert torch.are_deterministic_algorithms_enabled()
        return self.head(x)


def space(model: nn.Module, *, first: float = 0.0) -> tuple[Workspace, list[tuple[str, str]]]:
    chunks = [(torch.randn(4, 4), torch.tensor([0, 1, 2, 0])) for _ in range(3)]
    chunks[0][0][1, 0] = first
    # what it puts into a batch, an example alone has not
    made = workspace(model, chunks, "classification", batch_size=4, self_check="off")
    made.options.kinds = ("factors",)
    lines: list[tuple[str, str]] = []
    made.ports.log = lambda level, message: lines.append((level, message))
    return made, lines


def settings() -> tuple[Any, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark,
        [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ("math", "flash", "mem_efficient", "cudnn")],
        list(warnings.filters),
        warnings.showwarning,
    )


def test_an_operation_without_a_deterministic_form_is_named() -> None:
    before = settings()
    made, lines = space(Careless(), first=7.0)
    with pytest.warns(DeprecationWarning, match="own affair") as others:
        rows = list(KeptFactors(None, made).rows())
    assert all("deterministic" not in str(each.message) for each in others)
    assert [row.record.nondeterministic for row in rows] == [("put_",)]
    said = [message for level, message in lines if level == "warning"]
    assert len(said) == 1
    assert "put" in said[0]
    assert settings()[:5] == before[:5]


def test_without_one_there_is_none() -> None:
    made, lines = space(Careless())
    with pytest.warns(DeprecationWarning, match="own affair"):
        rows = list(KeptFactors(None, made).rows())
    assert [row.record.nondeterministic for row in rows] == [()]
    assert lines == []


def test_a_callers_filters_hide_no_alert_and_are_restored() -> None:
    made, _ = space(Careless(), first=7.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        filters = list(warnings.filters)
        rows = list(KeptFactors(None, made).rows())
        assert warnings.filters == filters
    assert rows[0].record.nondeterministic == ("put_",)


def test_alerts_before_a_checkpoint_are_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_SHARE", 0)
    scratch, stopped = MemoryArtifacts(), 0

    def attempt(stop_at: int | None) -> Workspace:
        nonlocal stopped
        stopped = 0
        torch.manual_seed(0)
        made, _ = space(Careless(), first=7.0)
        made.ports.scratch, made.resume.checkpoint_seconds = scratch, 1e-9

        def stop() -> None:
            nonlocal stopped
            stopped += 1
            if stopped == stop_at:
                raise StopRequested

        made.ports.raise_if_cancelled = stop
        return made

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(StopRequested):
            collect_or_read(attempt(3))
        again = attempt(None)
        # not heard again: neither the dry run's example nor the batches left bring it
        assert collect_or_read(again).nondeterministic == ("put_",)


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("scatter_add_cuda_kernel does not have a deterministic implementation, but you", "scatter_add_cuda_kernel"),
        ("Memory Efficient attention defaults to a non-deterministic algorithm.", "memory-efficient attention"),
        (FLASH, "flash attention"),
        (CUBLAS, "cuBLAS without CUBLAS_WORKSPACE_CONFIG"),
        ("an unrelated warning", None),
    ],
)  # fmt: skip
def test_the_words_of_other_machines_are_understood(message: str, named: str | None) -> None:
    heard: set[str] = set()
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        with set_numerics(HERE, heard):
            warnings.warn(message, UserWarning, stacklevel=1)
    assert heard == ({named} if named else set())
    assert len(others) == (named is None)


def test_what_is_told_once_a_process_is_told_every_time() -> None:
    before = torch.is_warn_always_enabled()
    for always in (False, True):
        torch.set_warn_always(always)
        with set_numerics(HERE, set()):
            assert torch.is_warn_always_enabled()
        assert torch.is_warn_always_enabled() == always
    torch.set_warn_always(before)


def test_what_cannot_be_repeated_is_said() -> None:
    earlier = {"device": "cuda", "threads": HERE.threads, "version": "1.0", "attention": ["torch's own choice"]}
    model = nn.Linear(4, 3)
    made, lines = space(model)
    made.resume.numerics = earlier
    (row,) = KeptFactors(None, made).rows()
    assert len(row.observed.not_replayed) == 2
    assert row.observed.not_replayed[0] == "device: cuda then, cpu now"
    assert any("other numerics" in message and "1.0 then" in message for level, message in lines if level == "warning")
    made, lines = space(model)
    plans: list[Any] = []
    made.ports.announce_plan = plans.append
    (row,) = KeptFactors(None, made).rows()
    assert (row.observed.not_replayed, lines) == ((), [])
    again, lines = space(model)
    again.resume.numerics = plans[0]["numerics"]
    (row,) = KeptFactors(None, again).rows()
    assert (row.observed.not_replayed, lines) == ((), [])


def card(**options: Any) -> Numerics:
    """Numerics of a GPU, with what is asked of it where ``options`` say it."""
    fixed = {"device": "cuda", "instructions": "sm_90", "threads": 1, "version": "2", "attention": ("math", "flash")}
    return Numerics(**{**fixed, **options})


VERSIONS = {
    "device_name": "NVIDIA H100", "multiprocessors": 132, "driver": "580.1", "cuda": "13.0", "cublas": "13.1.0",
    "cudnn": "91300", "cusolver": "12.0.4",
}  # fmt: skip


def test_another_card_driver_or_library_is_said() -> None:
    now = card(**VERSIONS)
    assert now.not_replayed(json.loads(json.dumps(now.recorded()))) == ()
    assert now.not_replayed(card(**VERSIONS | {"device_name": "NVIDIA A100", "cublas": "12.4.5"}).recorded()) == (
        "device_name: NVIDIA A100 then, NVIDIA H100 now",
        "cublas: 12.4.5 then, 13.1.0 now",
    )
    assert now.not_replayed(card(**VERSIONS | {"multiprocessors": 114, "driver": UNKNOWN}).recorded()) == (
        "multiprocessors: 114 then, 132 now",
        "driver: unknown then, 580.1 now",
    )


def test_an_older_plan_does_not_know_them() -> None:
    older = json.loads(json.dumps(card().recorded()))
    assert card(**VERSIONS).not_replayed(older) == (
        "device_name, multiprocessors, driver, cuda, cublas, cudnn, cusolver: unknown then",
    )
    assert card(**VERSIONS).not_replayed({**older, "device": "cpu"}) == ("device: cpu then, cuda now",)
    assert HERE.not_replayed({**HERE.recorded(), **VERSIONS}) == ()
    assert card(**VERSIONS).not_replayed(None) == ()


def test_kernels_of_attention_are_chosen_on_a_device_alone() -> None:
    before = settings()
    with set_numerics(card(), set()):
        assert settings()[4] == [True, True, False, False]
    with set_numerics(HERE, set()):
        assert settings()[4] == before[4]
    assert settings()[:5] == before[:5]


class Recurrent(nn.Module):
    """A recurrent layer and another one."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.GRU(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x[:, None])[0][:, 0])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_recurrent_layer_on_a_gpu_says_that_it_runs_without_cudnn(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(
        pass_statistics, "instead_of_cudnn", lambda layer, _: instead_of_cudnn(layer, torch.device(device))
    )
    whys = {layer.name: layer.why for layer in collect_or_read(space(Recurrent())[0]).layers}
    assert {"head", "recurrent.weight_ih_l0", "recurrent.weight_hh_l0"} <= whys.keys()
    says = {name for name, why in whys.items() if why.endswith(f"; {WITHOUT_CUDNN}")}
    assert says == ({name for name in whys if name.startswith("recurrent.")} if device == "cuda" else set())
    assert all("cuDNN" not in why for name, why in whys.items() if name not in says)


class Attending(nn.Module):
    """Attention over four positions, by the kernel that torch takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.entry, self.exit, self.head = nn.Linear(4, 24), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([x.roll(shift, -1) for shift in range(4)], 1)
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.entry(x).chunk(3, -1))
        met = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(self.exit(met.transpose(1, 2).flatten(2)).mean(1))


@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_attention_twice_gives_equal_digests(amp: Literal["off", "bf16"]) -> None:
    """Or its record has the reason why it need not; of a CPU none is known."""
    runs = []
    plans: list[Any] = []
    for _ in range(2):
        torch.manual_seed(1)
        made, _lines = space(Attending())
        made.options.collection = replace(made.options.collection, dtype="float32", amp=amp)
        made.ports.announce_plan = plans.append
        made.resume.numerics = plans[0]["numerics"] if plans else None
        runs.append(list(KeptFactors(None, made).rows()))
    digests = [[(row.layer, row.record.digest_A, row.record.digest_G) for row in run] for run in runs]
    reasons = [(row.record.nondeterministic, row.observed.not_replayed) for run in runs for row in run]
    assert len(digests[0]) == 3
    assert digests[0] == digests[1]
    assert set(reasons) == {((), ())}


def test_holding_them_loads_no_compiler() -> None:
    """It would take 70 MB of the host and a second, of every job."""
    program = (
        "import sys\n"
        "from engine.model.determinism import Numerics, set_numerics\n"
        "import torch\n"
        "with set_numerics(Numerics.here(torch.device('cpu')), set()):\n"
        "    assert torch.are_deterministic_algorithms_enabled()\n"
        "assert not torch.are_deterministic_algorithms_enabled()\n"
        "print([name for name in sys.modules if name.startswith('torch._inductor')])\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ran.stdout.strip() == "[]"


MODES: list[int] = []


class Looking(torch.autograd.Function):
    """The identity, whose backward pass notes torch's mode."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        MODES.append(torch.get_deterministic_debug_mode())
        return gradients[0]


def attended(x: Tensor) -> tuple[Tensor, Any]:
    """Two layers of attention with something before, between and after them, and the second one's node."""
    for _ in range(2):
        x = Looking.apply(x)
        x = nn.functional.scaled_dot_product_attention(x, x, x)
        node = x.grad_fn
    return Looking.apply(x), node


FOR_CPU = frozenset({"ScaledDotProductFlashAttentionForCpuBackward0"})


@pytest.mark.parametrize("times", [1, 2])
def test_torch_is_strict_while_attention_is_pulled_back_and_never_else(times: int) -> None:
    MODES.clear()
    with set_numerics(HERE, set()):
        outputs, node = attended(torch.randn(1, 2, 4, 8, requires_grad=True))
        assert node.name() in FOR_CPU
        hold_attention(outputs, FOR_CPU)
        seen = []
        node.register_prehook(lambda _: seen.append(torch.get_deterministic_debug_mode()))
        for _ in range(times):
            torch.autograd.backward(outputs.sum(), retain_graph=True)
    assert seen == [2] * times
    assert [1, 1, 1] * times == MODES


def test_attention_that_fails_leaves_no_strict_mode_to_what_follows() -> None:
    def fail(_: Any) -> None:
        raise MemoryError

    with set_numerics(HERE, set()):
        outputs, node = attended(torch.randn(1, 2, 4, 8, requires_grad=True))
        hold_attention(outputs, FOR_CPU)
        node.register_prehook(fail)
        with pytest.raises(MemoryError):
            torch.autograd.backward(outputs.sum())
        assert torch.get_deterministic_debug_mode() == 2
        leave_strict()
        assert torch.get_deterministic_debug_mode() == 1


def test_what_has_no_graph_has_no_attention_to_hold() -> None:
    with set_numerics(HERE, set()):
        hold_attention(torch.ones(2))
        hold_attention(torch.ones(2, requires_grad=True))
