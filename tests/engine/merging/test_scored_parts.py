"""Queries that pieces score over merged factors: bit for bit the results of one job over the same factors."""

import copy
import functools
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog.analyses.influence import InfluenceParams
from catalog.requests.collection import Collection, Stabilisation
from catalog.requests.inputs import Task
from engine.analyses.layer_analysis import make_analysis, run_analyses
from engine.errors import DataDiffer, NotMergeable
from engine.measurement.piece_storage import store_bases, store_correction
from engine.workspace import DataPart, JobOptions, ModelInputs, Ports, Resume, Workspace
from tests.divided import joining, piece, stored
from tests.oracles import MemoryArtifacts

EXAMPLES, QUERIES, BLOCK = 44, 7, 2
CUTS = (0, 16, 32, EXAMPLES)
SHARES = (0, 4, 6, QUERIES)
KIND = "influence"


class Net(nn.Module):
    """A norm, which has an exact block, and two layers of one input, which share an A."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(6, 3)
        self.q, self.k = nn.Linear(5, 6), nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.head(torch.tanh(self.q(x)) * self.k(x))


def examples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 5, generator=generator).double(), torch.randint(0, 3, (count,), generator=generator)


def job(of: str = "kfac", seed: int = 0, log: Callable[[str, str], None] = lambda _, __: None) -> Workspace:
    """The undivided job, made anew."""
    torch.manual_seed(seed)
    data, asked = examples(EXAMPLES, 1), examples(QUERIES, 2)
    params = InfluenceParams(
        block=BLOCK,
        of=of,
        tolerance=1e-7,
        iterations=200,
        texts=True,
        top=3,
        listed=5,
        groups={"head": ("head",)},  # type: ignore[arg-type]
    )
    return Workspace(
        inputs=ModelInputs(
            model=Net().double(),
            batches=lambda: iter([data]),
            task=Task(type="classification"),
            examples=EXAMPLES,
            text_of=lambda place: f"example {place}",
            query=ModelInputs(batches=lambda: iter([asked]), examples=QUERIES, text_of=lambda place: f"query {place}"),
        ),
        options=JobOptions(
            collection=Collection(
                dtype="float64", batch_size=16, fisher="type2", ekfac=of == "ekfac", self_check="off"
            ),
            stabilisation=Stabilisation(damping=1e-1, damping_mode="absolute"),
            kinds=(KIND,),
            decomposition="none",
            params={KIND: params},
        ),
        ports=Ports(artifacts=MemoryArtifacts(), scratch=MemoryArtifacts(), log=log),
        resume=Resume(checkpoint_seconds=1e-9),
    )


class Merged:
    """The stored factors of three pieces, and jobs over them."""

    def __init__(self, of: str) -> None:
        self.make = partial(job, of)
        self.pieces = tuple(stored(self.make, *each) for each in pairwise(CUTS))
        self.bases: MemoryArtifacts | None = None
        self.corrections: tuple[MemoryArtifacts, ...] = ()
        if of == "ekfac":
            joined = joining(self.make, self.pieces)
            store_bases(joined)
            self.bases = joined.ports.artifacts  # type: ignore[assignment]
            self.corrections = tuple(self._correction(*each) for each in pairwise(CUTS))

    def _correction(self, begin: int, end: int) -> MemoryArtifacts:
        made = piece(self.make, begin, end)
        made.inputs.bases = self.bases
        store_correction(made)
        return made.ports.artifacts  # type: ignore[return-value]

    def over(self, made: Workspace) -> Workspace:
        """A job with the merged factors in place of its own."""
        made.inputs.stored_pieces = self.pieces
        made.inputs.bases, made.inputs.stored_corrections = self.bases, self.corrections
        return made

    def scoring(self, begin: int, end: int, made: Workspace | None = None) -> Workspace:
        """The job of a piece of queries."""
        made = self.over(made or self.make())
        query = made.inputs.query
        assert query is not None
        assert query.batches is not None
        ((inputs, targets),) = query.batches()
        place = slice(begin, end)
        share = [(inputs[place], targets[place], torch.arange(begin, end))]
        made.inputs.query = ModelInputs(
            batches=lambda: iter(share),
            examples=end - begin,
            text_of=query.text_of,
            part=DataPart(begin=begin, end=end, examples=QUERIES, batches=query.batches),
        )
        return made

    def scored(self, begin: int, end: int) -> MemoryArtifacts:
        made = self.scoring(begin, end)
        make_analysis(KIND, made).begin()
        return made.ports.artifacts  # type: ignore[return-value]

    def joined(self, parts: list[MemoryArtifacts]) -> tuple[list[Any], Any, MemoryArtifacts]:
        """The job once all pieces have scored; it has neither model, data, queries nor texts."""
        made = self.over(joining(self.make, self.pieces))
        made.inputs.query = made.inputs.text_of = None
        made.inputs.stored_scores = tuple(parts)
        return ran(made)


@functools.cache
def of_pieces(of: str) -> Merged:
    """The pieces, which nobody changes, once for all tests."""
    return Merged(of)


def ran(made: Workspace) -> tuple[list[Any], Any, MemoryArtifacts]:
    """Rows without what was observed of the run, the summary and the artifacts of a job."""
    rows: list[Any] = []
    summaries: list[Any] = []
    run_analyses(
        made,
        lambda row: rows.append((row.ordinal, row.layer, row.status, row.metrics, row.record)),
        lambda _, own: summaries.append(own),
    )
    return rows, summaries[0], made.ports.artifacts  # type: ignore[return-value]


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize("of", ["kfac", "ekfac", "ggn"])
def test_pieces_of_queries_give_what_one_job_over_the_same_factors_gives(of: str) -> None:
    merged = of_pieces(of)
    rows, summary, kept = ran(merged.over(merged.make()))
    parts = [merged.scored(*each) for each in reversed(list(pairwise(SHARES)))][::-1]
    found_rows, found, found_kept = merged.joined(parts)
    assert found == summary
    assert found_rows == rows
    assert (found.queries, found.examples, len(found.listed), len(found.artifacts)) == (QUERIES, EXAMPLES, 5, 4)
    assert [each.text for each in found.listed] == [f"query {place}" for place in range(5)]
    for each in found.listed:
        assert all(one.text == f"example {one.example}" for one in (*each.lowering, *each.raising))
    assert set(found_kept.tensors) == set(kept.tensors) == set(found.artifacts)
    for name, own in kept.tensors.items():
        assert set(own) == {"scores", "scores.head"}
        assert all(torch.equal(found_kept.tensors[name][group], own[group]) for group in own)
    assert not [name for name in found_kept.tables if name.startswith(KIND)]
    # and to the rounding of the merge, or to the residual, those of a job that collects by itself
    _, alone, of_alone = ran(merged.make())
    tolerance = 1e-4 if of == "ggn" else 1e-9
    for name in alone.artifacts:
        for group, own in of_alone.tensors[name].items():
            torch.testing.assert_close(
                found_kept.tensors[name][group], own, rtol=0, atol=tolerance * float(own.abs().max())
            )
    assert (found.query_digest, found.loss_terms) == (alone.query_digest, alone.loss_terms)


def test_a_piece_goes_on_with_the_next_block() -> None:
    merged, log = of_pieces("kfac"), list[str]()
    whole = merged.scored(0, 4)
    first = merged.scoring(0, 4, job(log=lambda _, line: log.append(line)))
    make_analysis(KIND, first).begin()
    scratch = first.ports.scratch
    assert isinstance(scratch, MemoryArtifacts)
    del scratch.tables["influence/1.json"]
    again = merged.scoring(0, 4, job(log=lambda _, line: log.append(line)))
    again.ports.scratch = scratch
    make_analysis(KIND, again).begin()
    assert [line for line in log if "earlier attempt" in line] == [
        "queries from 0 on were scored by an earlier attempt"
    ]
    found = again.ports.artifacts
    assert isinstance(found, MemoryArtifacts)
    assert found.tables == whole.tables
    assert all(torch.equal(own["scores"], whole.tensors[name]["scores"]) for name, own in found.tensors.items())


def test_scores_that_are_missing_or_damaged_are_not_joined() -> None:
    merged = of_pieces("kfac")
    parts = [merged.scored(*each) for each in pairwise(SHARES)]

    def damaged(change: Callable[[list[MemoryArtifacts]], Any]) -> list[MemoryArtifacts]:
        own = copy.deepcopy(parts)
        change(own)
        return own

    cases: dict[str, tuple[Callable[[list[MemoryArtifacts]], Any], int]] = {
        "the last piece": (lambda own: own.pop(), 6),
        "the first piece": (lambda own: own.pop(0), 0),
        "a table": (lambda own: own[0].tables.pop("influence/1.json"), 2),
        "a score": (lambda own: own[1].tensors["influence/scores-00002.safetensors"]["scores"].neg_(), 4),
        "a number": (lambda own: own[1].tables["influence/2.json"]["body"]["block"].update(terms=1.0), 4),
        "an order": (lambda own: own.reverse(), 4),
    }
    for name, (change, whole) in cases.items():
        with pytest.raises(NotMergeable, match="the next ones are missing or damaged") as refused:
            merged.joined(damaged(change))
        assert f"scores of {whole} queries" in refused.value.message, name


def test_another_model_or_other_data_than_the_factors_are_of_are_refused() -> None:
    merged = of_pieces("kfac")
    with pytest.raises(NotMergeable, match=r"have the digest ([0-9a-f]+), and (?!\1)[0-9a-f]+ in the pieces") as other:
        make_analysis(KIND, merged.scoring(0, 2, job(seed=1))).begin()
    assert other.value.pointer == "/model"
    made = merged.scoring(0, 2)
    changed = examples(EXAMPLES, 1)
    changed[0][17, 0] += 1e-9
    made.inputs.batches = lambda: iter([changed])
    with pytest.raises(DataDiffer, match=r"digest ([0-9a-f]{16}) entered .* digest (?!\1)[0-9a-f]{16}"):
        make_analysis(KIND, made).begin()
