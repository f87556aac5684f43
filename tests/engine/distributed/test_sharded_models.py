"""A model that no rank holds whole: `fully_shard` over ranks, with the numbers of the unsharded model."""

import os
from collections.abc import Collection, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from engine.distributed.group import Ranks
from engine.errors import EngineError, ModelRefused
from engine.model.sharding.gathered_parameters import gathered_bytes
from engine.model.sharding.gathering import gather_on_request
from kronoscope.local import measure
from tests.engine.distributed import sharded_llama
from tests.engine.distributed.rank_processes import asked_for, run_ranks
from tests.engine.distributed.rank_scenarios import outcome
from tests.engine.distributed.sharded_llama import batches, llama, measured, units, watched, whole_bytes
from tests.engine.distributed.test_ranks import apart

CHECKED = {"self_check": "growing"}
CASES: dict[str, dict[str, Any]] = {
    "float64": {"batch_variance": True, **CHECKED},
    "ekfac": {"ekfac": True, "samples": 2, "update_freq": 2},
    "recomputed": {"dtype": "float32", "memory": {"activation_checkpointing": "on"}},
    "bf16": {"amp": "bf16", "dtype": "float32"},
}
"""Collections of equal numbers on one rank and several; in half precision only the same ranks round alike."""


class NarrowRank(nn.Module):
    """Says on rank 1 that memory is out for more than two different examples at once."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, **others: Any) -> Any:
        if os.environ.get("RANK") == "1" and len(input_ids) > 2 and not bool((input_ids[0] == input_ids[1]).all()):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return self.inner(input_ids=input_ids, **others)


def caught(function: Any) -> Any:
    try:
        return outcome(function())
    except EngineError as error:
        return type(error).__name__, str(error)


def spoilt(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        # the last rows stand on the last rank
        model.model.layers[1].mlp.up_proj.weight[-1, 0] = torch.nan
    return model


def on_ranks(rank: int, size: int, names: Collection[str]) -> dict[str, Any]:
    """All that is asked for in one process group: what failed before leaves nothing behind."""
    mesh = init_device_mesh(
        "cpu", (size,) if size == 2 else (2, 2), mesh_dim_names=("r", "s")[-1 if size == 2 else 0 :]
    )
    own = batches()[rank::size]
    found: dict[str, Any] = {}

    def shard(model: nn.Module) -> nn.Module:
        return sharded_llama.sharded(model, mesh)

    # the last rank has all data, and the others nothing
    if "empty" in names:
        found["empty"] = caught(lambda: measured(shard(llama()), batches() if rank == size - 1 else []))
    if size == 4:
        return found | {"float64": caught(lambda: measured(shard(llama()), own))}
    for name, options in CASES.items():
        if name not in names or name == "float64":
            continue
        found[name] = caught(lambda options=options: measured(shard(llama()), own, **options))
    if "bf16" in names:
        found["alike"] = caught(lambda: measured(llama(), own, **CASES["bf16"]))
    found["not finite"] = caught(lambda: measured(shard(spoilt(llama())), own))

    def narrow() -> Any:
        model = llama()
        shard(model)
        return measured(NarrowRank(model), own)

    if "narrow" in names:
        found["narrow"] = caught(narrow)
    found["cross-check"] = caught(
        lambda: measure(shard(llama()), own, task="causal_lm", params={"capacity": {"cross_check": "ggn"}})
    )
    model = shard(llama())
    before = {name: (id(each), each.to_local().clone()) for name, each in model.named_parameters()}
    with watched(model) as seen:
        found["float64"] = caught(lambda: measured(model, own, **CASES["float64"]))
    after = {name: (id(each), each.to_local()) for name, each in model.named_parameters()}
    found["kept"] = before.keys() == after.keys() and all(
        before[name][0] == after[name][0] and torch.equal(before[name][1], after[name][1]) for name in before
    )
    found["seen"] = seen
    found["local"] = sum(each.to_local().numel() * each.element_size() for each in model.parameters())
    found["trains"] = trained(model, own)
    return found


def trained(model: nn.Module, own: list[Any]) -> bool:
    """FSDP averages the gradients of a step as before; every rank has the first batch, so each part is the whole's."""
    ids = batches()[0][0]
    model(input_ids=ids, labels=ids).loss.backward()
    plain = llama()
    plain(input_ids=ids, labels=ids).loss.backward()
    wanted = {name: each.grad for name, each in plain.named_parameters()}
    return all(
        isinstance(each, DTensor) and bool(torch.allclose(each.grad.full_tensor(), wanted[name], atol=1e-5))
        for name, each in model.named_parameters()
    )


def raised(found: list[Any]) -> list[Any]:
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


@pytest.fixture(scope="module")
def together(request: pytest.FixtureRequest) -> list[Any]:
    return raised(run_ranks(2, on_ranks, 2, asked_for(request, "name")))


@pytest.fixture(scope="module")
def replicated(request: pytest.FixtureRequest) -> list[Any]:
    """Two copies of the model, each over two ranks."""
    return raised(run_ranks(4, on_ranks, 4, asked_for(request, "copied")))


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest) -> dict[str, Any]:
    names = {"float64", *asked_for(request, "name")} - {"bf16"}
    return {name: outcome(measured(llama(), batches(), **options)) for name, options in CASES.items() if name in names}


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("name", ["float64", "ekfac", "recomputed", "empty", "narrow"])
def test_sharded_models_have_the_factors_of_the_whole(name: str, together: list[Any], alone: dict[str, Any]) -> None:
    require_equal([each[name] for each in together], alone[name if name in alone else "float64"], name)


@pytest.mark.nightly(
    covered_by="tests/engine/distributed/test_sharded_models.py::test_sharded_models_have_the_factors_of_the_whole"
)
@pytest.mark.parametrize("copied", ["float64", "empty"])
def test_copies_of_a_sharded_model_have_the_factors_of_one(
    copied: str, replicated: list[Any], alone: dict[str, Any]
) -> None:
    require_equal([each[copied] for each in replicated], alone["float64"], copied)


def require_equal(results: list[Any], one: Any, name: str) -> None:
    tolerance = 1e-6 if name == "recomputed" else 1e-12
    for found in results:
        assert not isinstance(found, tuple), found
        inner = "inner." if name == "narrow" else ""
        assert found["factors"].keys() == {inner + layer for layer in one["factors"]}
        assert [layer.removeprefix(inner) for layer in found["declared"]] == one["declared"]
        assert found["examples"] == one["examples"]
        for layer, (A, G) in one["factors"].items():
            assert apart(found["factors"][inner + layer][0], A) <= tolerance, (layer, "A")
            assert apart(found["factors"][inner + layer][1], G) <= tolerance, (layer, "G")
            fact = found["records"][inner + layer]["exact_trace"]
            assert fact == pytest.approx(one["records"][layer]["exact_trace"], rel=max(100 * tolerance, 1e-9))
        for layer, product in one["corrected"].items():
            assert apart(found["corrected"][layer], product) <= 1e-9, layer


@pytest.mark.parametrize("name", ["bf16"])
def test_half_precision_rounds_as_in_the_whole_model(name: str, together: list[Any]) -> None:
    for found in together:
        assert found[name]["digests"] == found["alike"]["digests"]


def test_no_rank_holds_more_than_its_part_and_one_block(together: list[Any]) -> None:
    model = llama()
    block = whole_bytes(model.model.layers[0])
    *_, table, head, _ = units(model)
    rest = whole_bytes(model.model.norm)
    largest = max(block, whole_bytes(table), whole_bytes(head))
    # float64 doubles what is gathered
    for found in together:
        assert found["local"] <= 0.55 * whole_bytes(model)
        assert max(found["seen"]) <= 2 * (largest + rest)
        assert max(found["seen"]) >= 2 * block
        assert found["local"] + max(found["seen"]) / 2 <= 0.55 * whole_bytes(model) + largest + rest


def test_the_model_is_left_as_it_was_and_trains_on(together: list[Any]) -> None:
    for found in together:
        assert found["kept"]
        assert found["trains"]


def test_every_rank_refuses_alike(together: list[Any]) -> None:
    for found in together:
        assert found["not finite"][0] == "NonFiniteModel"
        assert "`model.layers.1.mlp.up_proj.weight` holds 1 NaN" in found["not finite"][1]
        assert found["cross-check"][0] == "RanksRefused"


# ---- a mesh of one rank: the same code without another process


@pytest.fixture
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class WritesOver(nn.Module):
    """Writes over what the backward pass of a sigmoid needs; torch refuses to train it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sigmoid(self.first(x))
        hidden.mul_(2)
        return self.second(hidden)


class ReadsAnother(nn.Module):
    """Multiplies by the weight of a module that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x @ self.first.weight)


def classified(model: nn.Module, **options: Any) -> Any:
    data = [(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(8, dtype=torch.int64))]
    return measure(model, data, task="classification", **options)


@pytest.mark.usefixtures("_one_rank")
def test_what_is_written_over_is_refused_as_in_the_whole_model() -> None:
    messages = []
    for wanted in (False, True):
        model = WritesOver()
        if wanted:
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ModelRefused, match="modified by an inplace operation") as refused:
            classified(model, collection={"self_check": "off"})
        messages.append(str(refused.value)[:90])
    assert messages[0] == messages[1]


@pytest.mark.usefixtures("_one_rank")
def test_reading_a_parameter_outside_its_unit_is_refused() -> None:
    model = ReadsAnother()
    for part in (model.first, model.second, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ModelRefused, match=r"shape \(4, 4\) in `.*matmul.*` while the unit"):
        classified(model)


@pytest.mark.usefixtures("_one_rank")
def test_hooks_class_and_attributes_come_back_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    before = type(model), dict(model._forward_pre_hooks), dict(model._forward_hooks), list(model.parameters())
    during: list[Any] = []

    def fail() -> None:
        with gather_on_request(model, Ranks.alone(), torch.device("cpu")):
            # nobody casts: the numbers are those that are kept
            during.extend([type(model), model(torch.randn(2, 4)).dtype])
            raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        fail()
    assert during == [nn.Sequential, torch.float32]
    assert before[:3] == (type(model), dict(model._forward_pre_hooks), dict(model._forward_hooks))
    assert all(own is other for own, other in zip(before[3], model.parameters(), strict=True))


@pytest.mark.usefixtures("_one_rank")
def test_gathered_bytes_are_those_of_the_two_largest_units() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    assert gathered_bytes(model) == 0
    for part in (*model, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
    assert gathered_bytes(model, 8) == 8 * (30 + 21) + 2 * 4 * 24


@pytest.mark.usefixtures("_one_rank")
def test_exact_products_of_a_sharded_model_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ModelRefused, match="this model is sharded"):
        classified(model, params={"capacity": {"cross_check": "ggn"}})


@pytest.mark.usefixtures("_one_rank")
def test_tensor_parallelism_is_refused_by_name() -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Replicate(), Shard(0)]))
    with pytest.raises(ModelRefused, match=r"`0\.weight` is sharded over ranks"):
        classified(model)
