"""Layers over ranks: what one rank measures, each layer decomposed by its owner alone, and its results with all."""

import dataclasses
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from catalog import ANALYSES
from catalog.analyses.analysis import most_decomposed
from catalog.analyses.capacity import CapacityParams
from catalog.analyses.reconstruction import ReconstructionParams
from catalog.analyses.spectrum import SpectrumParams
from catalog.requests.collection import Collection
from catalog.requests.woodbury import Woodbury
from engine.artifacts import Artifacts
from engine.distributed.group import join
from engine.distributed.traffic import sent_bytes
from engine.errors import RankFailed
from engine.linalg.eigendecomposition import decompose
from engine.measurement import decompose_layer
from engine.workspace import JobOptions, ModelInputs, Ports, Workspace
from kronoscope.local_inputs import task_record
from tests.engine.distributed.rank_processes import run_ranks
from tests.engine.distributed.rank_scenarios import BATCH, SCENARIOS
from tests.machine.parts import ALL, chosen_part, first_of
from tests.oracles import MemoryArtifacts
from worker.execution.ranks.rank_part import NoFiles

PARAMS = {
    "factors": None,
    # with a damping below rounding, null directions count by chance
    "capacity": CapacityParams(metrics=("trace", "participation_ratio", "effective_rank", "spectral_norm")),
    "reconstruction": ReconstructionParams(keep_matrices=True),
    "spectrum": SpectrumParams(),
}
BY_OWNERS = ("factors", "capacity", "reconstruction")
SEEN = ("decoder", "rows")


class Counted:
    """Counts the decompositions of each layer; one layer's may fail."""

    def __init__(self, fails: str | None) -> None:
        self.layers: list[str] = []
        self.fails = fails

    def __call__(self, factor: Tensor, layer: str, **how: Any) -> Any:
        if layer == self.fails:
            raise FloatingPointError(f"`{layer}` does not converge")
        self.layers.append(layer)
        return decompose(factor, layer, **how)


def job(name: str, own: list[Any], kinds: tuple[str, ...], artifacts: Artifacts, scratch: Any = None) -> Workspace:
    """A job as a worker makes it: of several ranks, rank 0 alone keeps files."""
    scenario = SCENARIOS[name]
    collection = Collection(batch_size=BATCH, dtype="float64", self_check="off")
    params = {kind: PARAMS[kind] for kind in kinds}
    made = Workspace(
        inputs=ModelInputs(
            model=scenario.model(),
            batches=lambda: iter(own),
            task=task_record("causal_lm" if scenario.ids else "classification"),
            examples=sum(len(each[2]) for each in own),
        ),
        options=JobOptions(
            collection=collection,
            woodbury=Woodbury(**scenario.woodbury),
            kinds=kinds,
            keep=("factors", "spectra"),
            params=params,
            decomposition=most_decomposed(each or ANALYSES[kind] for kind, each in params.items()),
        ),
        ports=Ports(artifacts=artifacts, scratch=scratch, keeps_files=isinstance(artifacts, MemoryArtifacts)),
    )
    made.machine.ranks = join(torch.device("cpu"))
    return made


def run(made: Workspace) -> dict[str, Any]:
    rows, summaries = {}, {}
    for kind in made.options.kinds:
        analysis = pkgutil.resolve_name(ANALYSES[kind].implementation)(made.options.params[kind], made).rows()
        while True:
            try:
                row = next(analysis)
            except StopIteration as end:
                summaries[kind] = end.value
                break
            rows[kind, row.layer] = row
    artifacts = made.ports.artifacts
    ranks = made.machine.ranks
    return {
        "rows": {key: (row.status, row.metrics) for key, row in rows.items()},
        "digests": {key: (row.record.digest_A, row.record.digest_G) for key, row in rows.items()},
        "sent": {key: row.record.sent_bytes for key, row in rows.items()},
        "summaries": summaries,
        "tensors": artifacts.tensors if isinstance(artifacts, MemoryArtifacts) else None,
        "tables": artifacts.tables if isinstance(artifacts, MemoryArtifacts) else None,
        "moved": {key: each.sent for key, each in ranks.traffic.moved.items()},
    }


def divided(rank: int, size: int, names: Sequence[str] = SEEN, fails: str | None = None) -> dict[str, Any]:
    """Scenarios as a job whose analyses all go by owners, kept in a scratch place, and as one whose do not."""
    found: dict[str, Any] = {}
    for name in names:
        for kinds in (BY_OWNERS, tuple(PARAMS)):
            counted = decompose_layer.decompose = Counted(fails)  # type: ignore[attr-defined]
            own = SCENARIOS[name].batches()[rank::size]
            scratch = MemoryArtifacts() if kinds is BY_OWNERS else None
            made = job(name, own, kinds, MemoryArtifacts() if rank == 0 else NoFiles(), scratch)
            found[name, kinds] = {**run(made), "decomposed": counted.layers}
            assert scratch is None or not [each for each in scratch.tensors if each.startswith("sent/")]
    return found


def alone(name: str, kinds: tuple[str, ...]) -> dict[str, Any]:
    return run(job(name, SCENARIOS[name].batches(), kinds, MemoryArtifacts()))


def require_close(found: Any, expected: Any, where: str) -> None:
    """Equal but for the rounding of sums over ranks."""
    if isinstance(expected, Tensor):
        assert found.shape == expected.shape, where
        difference = float((found.double() - expected.double()).norm())
        assert difference <= 1e-5 * max(float(expected.double().norm()), 1e-12), where
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-9), where
    elif dataclasses.is_dataclass(expected):
        for each in dataclasses.fields(expected):
            own, value = getattr(found, each.name), getattr(expected, each.name)
            # whether rounding may have drawn an eigenvalue of zero is rounding itself
            own, value = (own or 0.0, value or 0.0) if each.name == "bound" else (own, value)
            if each.name not in ("digest", "relative_error", "found_by", "converged"):
                require_close(own, value, f"{where}.{each.name}")
    elif isinstance(expected, Mapping):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            require_close(found[key], value, f"{where}[{key}]")
    elif isinstance(expected, tuple | list):
        assert len(found) == len(expected), where
        for place, value in enumerate(expected):
            require_close(found[place], value, f"{where}[{place}]")
    else:
        assert found == expected, where


def require_formula(ranks: list[Any], *, to_owner: bool) -> None:
    """Of every dense matrix, the bytes that all ranks send are those of the formula."""
    seen = 0
    for side, dimension in (("A", "in_dim"), ("G", "out_dim")):
        for facts in ranks[0]["tables"]["factors/factors.index.json"]["layers"]:
            dense = facts["form"] == "kronecker" and (side == "A" or facts["representation_G"] == "dense")
            sent = sum(each["moved"].get((facts["name"], side), 0) for each in ranks)
            if dense and sent:
                one = sent_bytes("dense", ranks=3, rows=0, size=facts[dimension], item=8, to_owner=to_owner)
                assert sent == pytest.approx(3 * one, rel=0.01), (facts["name"], side)
                seen += 1
    assert seen >= 2


def test_each_layer_is_decomposed_once_and_known_to_all(request: pytest.FixtureRequest) -> None:
    part = chosen_part(request.config)
    # a landing takes one of them in turn
    names = SEEN if part == ALL else SEEN[first_of(part, 2) :][:1]
    together = run_ranks(3, divided, 3, names)
    for each in together:
        if isinstance(each, Exception):
            raise each
    for name in names:
        for kinds in (BY_OWNERS, tuple(PARAMS)):
            one, ranks = alone(name, kinds), [each[name, kinds] for each in together]
            require_close(ranks[0]["rows"], one["rows"], f"{name} {kinds}")
            for each in ranks[1:]:
                assert each["rows"] == ranks[0]["rows"]
                assert each["summaries"] == ranks[0]["summaries"]
                assert each["tensors"] is None
            # files that owners made have reached the one who writes
            assert ranks[0]["tables"].keys() == one["tables"].keys()
            assert {key: each.keys() for key, each in ranks[0]["tensors"].items()} == {
                key: each.keys() for key, each in one["tensors"].items()
            }
            for file, tensors in one["tensors"].items():
                for key, tensor in tensors.items():
                    # a basis, and the triangle of rows, is one of several
                    if "vectors" not in key and "rows" not in key:
                        require_close(ranks[0]["tensors"][file][key], tensor, f"{name} {file} {key}")
            layers = [set(each["decomposed"]) for each in ranks]
            assert all(layers)
            assert not any(first & other for place, first in enumerate(layers) for other in layers[:place])
            require_formula(ranks, to_owner=kinds is BY_OWNERS)
            # bases move where an analysis reads those of other layers
            bases = sum(
                sent for each in ranks for (_, operation), sent in each["moved"].items() if operation == "bases"
            )
            assert (bases > 0) == (kinds is not BY_OWNERS)


def test_an_owner_that_fails_is_named_with_its_layer() -> None:
    found = run_ranks(2, divided, 2, SEEN, "head")
    (other,) = [rank for rank, each in enumerate(found) if isinstance(each, RankFailed)]
    assert f"rank {1 - other} of 2 failed: " in str(found[other])
    assert all("`head` does not converge" in str(each) for each in found)
