"""The round `score`: pieces share the queries of an influence, and the job's results are those of the undivided one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from catalog.frames import Divided, LogLine, Planned, Progress, Summarised
from engine.errors import StopRequested
from tests.worker.execution.pieces.conftest import Run, Runner
from tests.worker.execution.pieces.test_division import DIGITS, SHUFFLED
from worker.execution.attempt import StopFlag
from worker.execution.data.builtin import english_paragraphs
from worker.execution.files.artifact_files import ArtifactFiles
from worker.execution.refusal import Refusal

KIND = "influence"
QUERY = {"source": "builtin", "name": "digits", "limit": 7}
ASKED: dict[str, Any] = {
    **DIGITS,
    "kind": ["factors", "influence"],
    "data": {"source": "builtin", "name": "digits", "limit": 70},
    "collection": {**DIGITS["collection"], "dtype": "float64"},
    "stabilisation": {"damping": 1e-2, "damping_mode": "absolute"},
    "influence": {"query": QUERY, "block": 2, "listed": 5, "top": 3},
}


def asked(of: str = "kfac", **options: Any) -> dict[str, Any]:
    collection = {**ASKED["collection"], "ekfac": of == "ekfac"}
    # of the solver's steps two are enough to differ; K-FAC takes none
    influence = {**ASKED["influence"], "of": of, "iterations": 2, **options}
    return {**ASKED, "collection": collection, "influence": influence}


def summary(run: Run) -> dict[str, Any]:
    (found,) = [frame.summary for frame in run.frames if isinstance(frame, Summarised) and frame.kind == "influence"]
    return dict(found)


def scores(run: Run) -> Tensor:
    files = ArtifactFiles(run.folder / "artifacts", None)
    return torch.cat([files.load_tensors(name)["scores"] for name in summary(run)["artifacts"]])


def rounds(run: Run) -> list[tuple[str, int, int]]:
    """Round, first and last of each piece."""
    return [(each["piece"]["round"], each["piece"]["begin"], each["piece"]["end"]) for each in run.pieces]


def require_close(run: Run, whole: Run) -> None:
    """Rows, summary, scores and files of a divided job and of one that is not, to the rounding of the merge."""
    expected = scores(whole)
    torch.testing.assert_close(scores(run), expected, rtol=0, atol=1e-8 * float(expected.abs().max()))
    found, truth = summary(run), summary(whole)
    exact = ("queries", "examples", "loss_terms", "query_digest", "artifacts", "unconverged", "layers", "of")
    assert {name: found[name] for name in exact} == {name: truth[name] for name in exact}
    for one, other in zip(found["listed"], truth["listed"], strict=True):
        assert (one["query"], one["text"], one["iterations"]) == (other["query"], other["text"], other["iterations"])
        assert one["self_influence"] == pytest.approx(other["self_influence"], rel=1e-8)
        for name in ("lowering", "raising"):
            assert [each["example"] for each in one[name]] == [each["example"] for each in other[name]]
            assert [each["text"] for each in one[name]] == [each["text"] for each in other[name]]
    for row, own in zip(run.rows, whole.rows, strict=True):
        assert (row["kind"], row["layer"]) == (own["kind"], own["layer"])
        if row["kind"] == "influence" and row["metrics"] is not None:
            assert row["metrics"] == pytest.approx(own["metrics"], rel=1e-7)
    names = [{path.name for path in (each.folder / "artifacts" / "influence").iterdir()} for each in (run, whole)]
    assert names[0] == names[1]


# K-FAC is what the next test asks for, and compares as this one does
@pytest.mark.parametrize("of", [pytest.param("kfac", marks=pytest.mark.nightly), "ekfac", "ggn"])
def test_the_results_are_those_of_the_undivided_job(runner: Runner, of: str) -> None:
    whole = runner.job("whole", asked(of))
    run = runner.job("divided", {**asked(of), "shards": 3}, order=lambda pieces: list(pieces)[::-1])
    collected = [(0, 32), (32, 64), (64, 70)]
    corrected = [("correct", *each) for each in collected] if of == "ekfac" else []
    # blocks of two: two, one and one of them
    scored = [("score", 0, 4), ("score", 4, 6), ("score", 6, 7)]
    assert rounds(run) == [*(("collect", *each) for each in collected), *corrected, *scored]
    assert run.finished.examples == 70
    require_close(run, whole)


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize(("shards", "block", "pieces"), [(3, 32, [(0, 7)]), (1, 2, [(0, 7)]), (2, 6, [(0, 6), (6, 7)])])
@pytest.mark.part(of=2, law="pieces score as the undivided job does")
def test_there_are_as_many_pieces_as_collected_and_no_more_than_blocks(
    runner: Runner, shards: int, block: int, pieces: list[tuple[int, int]]
) -> None:
    whole = runner.job("whole", asked(block=block))
    run = runner.job("divided", {**asked(block=block), "shards": shards})
    assert [each[1:] for each in rounds(run) if each[0] == "score"] == pieces
    require_close(run, whole)


@pytest.mark.part(of=2, law="pieces score as the undivided job does")
def test_texts_are_quoted_by_the_pieces(
    runner: Runner, saved: Callable[..., Path], minilm: Path, tmp_path: Path
) -> None:
    config = transformers.BertConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_labels=2
    )
    model = saved("AutoModelForSequenceClassification", config)
    for each in minilm.glob("*token*"):
        shutil.copy(each, model)
    texts = [" ".join(text.split())[: 40 + 13 * (place % 5)] for place, text in enumerate(english_paragraphs()[:14])]
    for name, count in (("data", 14), ("query", 7)):
        rows = [json.dumps({"text": text, "label": place % 2}) for place, text in enumerate(texts[-count:])]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    source = {"source": "file", "path": str(tmp_path / "data.jsonl"), "sequence_length": 12}
    query = {**source, "path": str(tmp_path / "query.jsonl")}
    document = {
        "kind": "influence",
        "model": {"source": "directory", "path": str(model)},
        "data": source,
        "task": {"type": "sequence_classification"},
        "collection": {"batch_size": 4, "self_check": "off"},
        "influence": {"query": query, "block": 4, "texts": True, "top": 2},
    }
    run = runner.job("divided", {**document, "shards": 2})
    assert [each[1:] for each in rounds(run) if each[0] == "score"] == [(0, 4), (4, 7)]
    listed = summary(run)["listed"]
    assert [each["text"] for each in listed] == texts[-7:]
    for each in (one for own in listed for one in (*own["lowering"], *own["raising"])):
        assert each["text"] == texts[each["example"]]


def last_attempt(run: Run, document: dict[str, Any]) -> dict[str, Any]:
    known = {"pieces": run.pieces, "divided": str(run.folder / "artifacts"), "artifacts": str(run.folder / "again")}
    return {"document": document, **known}


@pytest.mark.part(of=2, law="pieces score as the undivided job does")
def test_pieces_that_read_other_queries_or_other_data_are_refused(runner: Runner) -> None:
    document = {**asked(), "shards": 2}
    run = runner.job("divided", document)
    read = run.folder / "score-1" / "factors" / "read.json"
    told = json.loads(read.read_text())
    one_pass = r"up to query 4, piece 1 of 2 of round `score` read data of the digest \w{64}, and piece 2 of 2 a"
    rounds_differ = (
        r"up to example 70, piece 2 of 2 read data of the digest \w{64} in round `collect`, and b in round `sc"
    )
    for changed, message, pointer in (
        ({"before": "a"}, one_pass, "/influence/query"),
        ({"data": "b"}, rounds_differ, "/data"),
    ):
        read.write_text(json.dumps({**told, **changed}))
        with pytest.raises(Refusal, match=message) as refused:
            runner.attempt(last_attempt(run, document))
        assert (refused.value.code, refused.value.pointer) == ("data_differ", pointer)
    read.write_text(json.dumps(told))
    pieces = json.loads(json.dumps(run.pieces))
    pieces[-1]["model_sha256"] = "c"
    with pytest.raises(Refusal, match=r"measured the digest \w{64}, and piece 2 of 2 of round `score` c") as refused:
        runner.attempt({**last_attempt(run, document), "pieces": pieces})
    assert (refused.value.code, refused.value.pointer) == ("model_differs", "/model")


@pytest.mark.part(of=2, law="pieces score as the undivided job does")
def test_queries_that_are_shuffled_anew_in_each_process_are_refused(
    runner: Runner, import_path: None, tmp_path: Path
) -> None:
    (tmp_path / "shuffled_queries.py").write_text(SHUFFLED)
    query = {"source": "factory", "factory": "shuffled_queries:examples"}
    with pytest.raises(Refusal, match=r"up to query 32, piece 1 of 2 .* piece 2 of 2") as refused:
        runner.job("drawn", {**asked(query=query, block=16), "shards": 2})
    assert refused.value.pointer == "/influence/query"
    # 64 of a source that does not say how many it has
    run = runner.job("seeded", {**asked(query={**query, "kwargs": {"seed": 3}}, block=16), "shards": 2})
    assert [each[1:] for each in rounds(run) if each[0] == "score"] == [(0, 32), (32, 64)]


def test_what_cannot_be_scored_is_refused_before_anything_is_collected(runner: Runner) -> None:
    with pytest.raises(Exception, match="of which no layer is a part") as refused:
        runner.job("groups", {**asked(groups={"mine": ["conv9"]}), "shards": 2})
    assert not list((runner.folder / "groups").glob("collect-*"))
    assert "conv9" in str(refused.value)


class Stopping(StopFlag):
    """Stops at a call."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def checkpoint(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise StopRequested


@pytest.mark.part(of=2, law="pieces score as the undivided job does")
def test_a_piece_plans_what_it_holds_and_goes_on_where_it_was_stopped(runner: Runner) -> None:
    document, run = {**asked(), "shards": 1}, runner.folder / "stopped"
    whole = runner.job("whole", document)
    before = [each for each in whole.pieces if each["piece"]["round"] == "collect"]
    (scored,) = [each for each in whole.pieces if each["piece"]["round"] == "score"]
    given = {"document": document, "pieces": before, "divided": str(whole.folder / "artifacts"),
             "piece": scored["piece"], "artifacts": str(run / "score-0"), "scratch": str(run / "scratch"),
             "checkpoint_seconds": 1e-9}  # fmt: skip
    tables = run / "scratch" / "influence"
    for calls in range(16, 100, 6):
        with pytest.raises(StopRequested):
            runner.attempt(given, Stopping(calls))
        if len(list(tables.glob("*.json"))) >= 2:
            break
    done = len(list(tables.glob("*.json")))
    assert 2 <= done < 4
    frames, finished = runner.attempt(given)
    said = [frame.message for frame in frames if isinstance(frame, LogLine) and "earlier attempt" in frame.message]
    assert len(said) == done
    assert not isinstance(finished, Divided)
    assert finished.examples == 7
    files = [ArtifactFiles(Path(place), None) for place in (scored["path"], given["artifacts"])]  # type: ignore[arg-type]
    for number in range(4):
        one, other = (each.load_tensors(f"influence/scores-{number:05d}.safetensors") for each in files)
        assert torch.equal(one["scores"], other["scores"])
    # the last counts the merge too
    *_, plan = (frame.plan for frame in frames if isinstance(frame, Planned))
    terms = {(term["name"], term["place"]): term["size_bytes"] for term in plan["terms"] if term["stage"] == KIND}
    assert (terms["scores", "host"], terms["scores", "disk"]) == (3 * 8 * 2 * 70, 8 * 7 * 70)
    assert {"merge", "factors of the pieces"} <= {term["name"] for term in plan["terms"]}
    shown = [(frame.done, frame.total) for frame in frames if isinstance(frame, Progress) and frame.unit == "queries"]
    # the pipe leaves out reports that follow at once
    assert shown
    assert {total for _, total in shown} == {7}
    assert shown == sorted(shown)
    assert {done for done, _ in shown} <= set(range(8))


@pytest.mark.part(of=2, law="pieces score as the undivided job does")
def test_the_plan_of_a_piece_counts_the_scores_of_all_examples(runner: Runner) -> None:
    def planned(**options: Any) -> dict[str, Any]:
        given = {
            "document": {**asked(of="ekfac"), **options},
            "artifacts": str(runner.folder / "plan"),
            "estimate": True,
        }
        return dict(next(frame.plan for frame in runner.attempt(given)[0] if isinstance(frame, Planned)))

    def of_the_stage(plan: dict[str, Any]) -> list[tuple[str, Any, int]]:
        return [
            (each["name"], each["layer"], each["size_bytes"]) for each in plan["terms"] if each["stage"] == "influence"
        ]

    assert of_the_stage(planned(shards=3)) == of_the_stage(planned())
    small = {
        "memory": {"host": "400MiB"},
        "data": {**DIGITS["data"], "limit": 1700},
        "influence": {**ASKED["influence"], "query": {**QUERY, "limit": 1700}, "block": 1700},
    }
    assert planned(shards=3, **small)["fits"] is False
