"""The loss's head: probabilities kept in place of gradients, against the dense exact Fisher of the same data."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from catalog.requests.inputs import Task
from catalog.requests.woodbury import Woodbury
from engine.analyses.factors import KeptFactors
from engine.collect import collect_or_read
from engine.collection import checkpoints
from engine.errors import StopRequested
from engine.factors.diagonal_sketch import DiagonalSketch
from engine.factors.factor_set import FactorSet
from engine.factors.softmax_fisher import SoftmaxFisher
from engine.memory.plan import Chosen
from engine.workspace import Workspace
from tests.oracles import MemoryArtifacts, relative_error, workspace

CLASSES = 40
VOCABULARY = 24
EXACT = 1e-10


class Net(nn.Module):
    """A head of many classes, and what may stand between it and the loss."""

    def __init__(self, between: str = "nothing", *, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 6)
        self.head = nn.Linear(6, CLASSES, bias=bias)
        self.between = between
        # an iterator moves on: numbers are put back after every forward pass
        self.forwards = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        number = next(self.forwards)
        inside = torch.tanh(self.first(x))
        logits = self.head(inside)
        if self.between == "a scale":
            return logits * 2
        if self.between == "a scale in place":
            return logits.mul_(2)
        if self.between == "a second call":
            return logits + self.head(inside.flip(-1))
        if self.between == "a scale later on" and number > 4:
            return logits * 2
        return logits


def language_model(*, tied: bool) -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=8, n_embd=8, n_layer=1, n_head=2, tie_word_embeddings=tied,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def drawn(examples: int = 8, terms: int | None = 2) -> list[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(1)
    shape = (examples,) if terms is None else (examples, terms)
    inputs = torch.randn(*shape, 5, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, CLASSES, shape, generator=generator)
    return [(inputs, targets)]


def texts() -> list[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (4, 6), generator=generator)
    mask = torch.ones(4, 6, dtype=torch.int64)
    mask[1, 4:] = 0
    mask[3, 2:] = 0
    return [({"input_ids": ids, "attention_mask": mask}, ids.masked_fill(ids == int(ids[0, 2]), -100))]


def space(model: nn.Module, chunks: list[tuple[Any, ...]], policy: str = "all", **options: Any) -> Workspace:
    task = "causal_lm" if isinstance(model, GPT2LMHeadModel) else "classification"
    made = workspace(model, chunks, task, **options)
    made.options.woodbury = Woodbury(policy=policy)  # type: ignore[arg-type]
    made.inputs.examples = sum(len(chunk[1]) for chunk in chunks)
    return made


def head(whole: FactorSet, name: str = "head") -> SoftmaxFisher:
    (facts,) = [layer for layer in whole.layers if layer.name == name]
    side = whole.load(facts.ordinal).G
    assert isinstance(side, SoftmaxFisher), facts.why
    assert facts.representation_G == "softmax_head"
    return side


def dense(whole: FactorSet, name: str = "head") -> Tensor:
    (facts,) = [layer for layer in whole.layers if layer.name == name]
    return whole.load(facts.ordinal).dense_G


def trace(whole: FactorSet, name: str = "head") -> tuple[float | None, float | None]:
    (facts,) = [layer for layer in whole.layers if layer.name == name]
    return facts.exact_trace, facts.trace_standard_error


@pytest.mark.part(of=32, by=("fisher",))
@pytest.mark.parametrize("fisher", ["type2", "mc"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sharing": "reduce"},
        {"update_freq": 2, "batch_size": 2},
        {"ema_decay": 0.7, "batch_size": 2},
        {"dtype": "float32"},
    ],
)
def test_it_is_the_dense_exact_fisher(fisher: str, options: dict[str, Any]) -> None:
    chunks = drawn()
    chunks[0][1][1, 0] = chunks[0][1][4, 1] = -100
    exact = 1e-6 if "dtype" in options else EXACT
    truth = collect_or_read(space(Net(), chunks, "dense", fisher="type2", **options))
    found = collect_or_read(space(Net(), chunks, fisher=fisher, **options))
    side = head(found)
    assert side.count == found.layers[1].terms == (6 if "update_freq" in options else 14)
    assert relative_error(side.to_dense(torch.float64), dense(truth).double()) < exact
    for own, expected in zip(trace(found), trace(truth), strict=True):
        assert expected is None or own == pytest.approx(expected, rel=exact)
    assert [facts.terms for facts in found.layers] == [facts.terms for facts in truth.layers]


@pytest.mark.parametrize("bias", [True, False])
def test_trainable_parts_and_single_terms(*, bias: bool) -> None:
    model, again = Net(bias=bias), Net(bias=bias)
    for each in (model, again):
        each.head.weight.requires_grad_(not bias)
    chunks = drawn(terms=None)
    truth, found = collect_or_read(space(again, chunks, "dense")), collect_or_read(space(model, chunks, fisher="mc"))
    assert relative_error(head(found).to_dense(torch.float64), dense(truth)) < EXACT
    assert trace(found) == pytest.approx(trace(truth), rel=EXACT)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_class_weights_and_smoothing_weigh_the_terms(smoothing: float) -> None:
    weights = tuple(0.25 + (place % 5) for place in range(CLASSES))
    task = Task(type="classification", class_weights=weights, label_smoothing=smoothing)
    sides = []
    for policy, fisher in (("dense", "type2"), ("all", "mc")):
        made = space(Net(), drawn(), policy, fisher=fisher)
        made.inputs.task = task
        sides.append(collect_or_read(made))
    assert relative_error(head(sides[1]).to_dense(torch.float64), dense(sides[0])) < EXACT
    assert trace(sides[1]) == pytest.approx(trace(sides[0]), rel=EXACT)


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("tied", [False, True])
def test_a_language_model(*, tied: bool) -> None:
    name = "transformer.wte" if tied else "lm_head"
    chunks = texts()
    truth = collect_or_read(space(language_model(tied=tied), chunks, "dense"))
    found = collect_or_read(space(language_model(tied=tied), chunks))
    side = head(found, name)
    assert (side.excess is not None) is tied
    assert side.count == int((chunks[0][0]["attention_mask"][:, 1:] * (chunks[0][1][:, 1:] != -100)).sum())
    assert relative_error(side.to_dense(torch.float64), dense(truth, name)) < EXACT
    assert trace(found, name) == pytest.approx(trace(truth, name), rel=EXACT)
    for left, right in zip(truth.layers, found.layers, strict=True):
        assert relative_error(found.load(right.ordinal).A, truth.load(left.ordinal).A) < EXACT


def test_the_record_says_what_is_kept() -> None:
    made = space(Net(), drawn(), fisher="mc", dtype="float32")
    made.options.woodbury = Woodbury(policy="all", dtype="fp16")
    (record,) = [row.record for row in KeptFactors(None, made).rows() if row.layer == "head"]
    assert (record.branch, record.gradient_rows, record.gradient_rows_dtype) == ("softmax_head", 16, "float16")
    assert record.why.startswith("its outputs are the logits of a cross-entropy: G is the exact Fisher of the softmax")
    assert "the mean over labels of what `mc` samples" in record.why


def test_other_layers_keep_their_samples() -> None:
    truth = collect_or_read(space(Net(), drawn(), "dense", fisher="mc"))
    found = collect_or_read(space(Net(), drawn(), fisher="mc"))
    assert torch.equal(found.load(0).A, truth.load(0).A)
    assert relative_error(found.load(0).widened_G, truth.load(0).widened_G) < EXACT
    assert trace(found, "first") == trace(truth, "first")


@pytest.mark.parametrize("between", ["a scale", "a second call"])
def test_what_stands_between_head_and_loss_is_seen(between: str) -> None:
    found = collect_or_read(space(Net(between), drawn()))
    assert found.layers[1].representation_G == "woodbury"
    truth = collect_or_read(space(Net(between), drawn(), "dense"))
    assert relative_error(found.load(1).widened_G, truth.load(1).widened_G) < EXACT


def test_what_overwrites_the_logits_is_seen() -> None:
    found, truth = (collect_or_read(space(Net(between), drawn())) for between in ("a scale in place", "a scale"))
    assert found.declared == ()
    assert relative_error(found.load(1).widened_G, truth.load(1).widened_G) < EXACT


def test_what_comes_between_them_later_on_declares_the_head() -> None:
    made = space(Net("a scale later on"), drawn(16), batch_size=4)
    found = collect_or_read(made)
    assert [(layer.name, layer.reason) for layer in found.declared] == [("head", "unforeseen_use")]
    assert [layer.name for layer in found.layers] == ["first"]


@pytest.mark.parametrize("options", [{"fisher": "empirical"}, {"ekfac": True}])
def test_what_is_no_softmax_fisher_is_left_alone(options: dict[str, Any]) -> None:
    found = collect_or_read(space(Net(), drawn(), **options))
    assert found.layers[1].representation_G != "softmax_head"


def test_options_decide() -> None:
    made = space(Net(), drawn())
    made.options.woodbury = Woodbury(policy="all", softmax_head=False)
    assert collect_or_read(made).layers[1].representation_G == "woodbury"
    # 16 terms are 0.4 of 40 classes, and 17 are more than 0.414
    assert collect_or_read(space(Net(), drawn(16, None), "auto")).layers[1].representation_G == "softmax_head"
    assert collect_or_read(space(Net(), drawn(17, None), "auto")).layers[1].representation_G == "dense"
    made = space(Net(), drawn())
    made.options.woodbury = Woodbury(policy="hybrid", hybrid_from=CLASSES + 1)
    assert collect_or_read(made).layers[1].representation_G == "dense"


def test_slices_and_passes_change_nothing_but_rounding() -> None:
    whole = collect_or_read(space(Net(), drawn(), fisher="mc"))
    sliced = space(Net(), drawn(), fisher="mc")
    sliced.options.memory = replace(sliced.options.memory, micro_batch=1)
    assert relative_error(head(collect_or_read(sliced)).rows, head(whole).rows) < 1e-14
    apart = space(Net(), drawn(), fisher="mc")
    apart.resume.chosen, apart.ports.scratch = Chosen(parts=(("first",), ("head",))), MemoryArtifacts()
    found = collect_or_read(apart)
    assert found.passes == 2
    assert head(found).digest() == head(whole).digest()
    assert trace(found) == trace(whole)


def test_nested_sizes_are_those_of_the_first_examples() -> None:
    found = collect_or_read(space(Net(), drawn(16), fisher="mc", nested=True, batch_size=2))
    for size in found.nested:
        first = collect_or_read(space(Net(), [tuple(each[: size.examples] for each in drawn(16)[0])], fisher="mc"))
        side = size.load(1).G
        assert isinstance(side, SoftmaxFisher)
        assert relative_error(side.to_dense(torch.float64), head(first).to_dense(torch.float64)) < EXACT


@pytest.mark.part(of=16, by=("tied",))
@pytest.mark.parametrize("stop_at", [2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_a_stopped_collection_ends_with_the_same_bits(
    stop_at: int, monkeypatch: pytest.MonkeyPatch, *, tied: bool
) -> None:
    monkeypatch.setattr(checkpoints, "_SHARE", 0)

    def made(scratch: MemoryArtifacts, stop: int = 0) -> Workspace:
        own = space(language_model(tied=tied), texts(), fisher="mc", batch_size=1, ema_decay=0.9)
        own.ports.scratch, own.resume.checkpoint_seconds = scratch, 1e-9
        asked = iter(range(1, 100))

        def check() -> None:
            if next(asked) == stop:
                raise StopRequested

        own.ports.raise_if_cancelled = check
        return own

    def digests(own: Workspace) -> list[tuple[str, str | None, str | None]]:
        return [(row.layer, row.record.digest_A, row.record.digest_G) for row in KeptFactors(None, own).rows()]

    truth = digests(made(MemoryArtifacts()))
    scratch = MemoryArtifacts()
    with pytest.raises(StopRequested):
        collect_or_read(made(scratch, stop_at))
    again = made(scratch)
    lines: list[str] = []
    again.ports.log = lambda _, message: lines.append(message)
    assert digests(again) == truth
    assert any(line.startswith("collection resumed at batch") for line in lines)


def test_half_precision_of_the_model_keeps_the_sums_precision() -> None:
    truth = head(collect_or_read(space(Net(), drawn(), fisher="mc", dtype="float32")))
    side = head(collect_or_read(space(Net(), drawn(), fisher="mc", dtype="float32", amp="bf16")))
    assert side.rows.dtype == torch.float32
    assert relative_error(side.rows, truth.rows) < 2e-2
    assert side.trace() == pytest.approx(truth.trace(), rel=1e-2)


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("fisher", ["empirical", "type2"])
def test_a_tied_head_that_does_not_fit_is_sketched_where_that_is_allowed(fisher: str) -> None:
    truth = collect_or_read(space(language_model(tied=True), texts(), "dense", fisher=fisher))
    made = space(language_model(tied=True), texts(), "dense", fisher=fisher)
    names = tuple(layer.name for layer in truth.layers)
    made.resume.chosen = Chosen(parts=(names,), sketched=("transformer.wte",))
    made.options.woodbury = Woodbury(approximate=True, sketch_rank=VOCABULARY)
    found = collect_or_read(made)
    (facts,) = [layer for layer in found.layers if layer.name == "transformer.wte"]
    side, exact = found.load(facts.ordinal).G, dense(truth, "transformer.wte")
    assert isinstance(side, DiagonalSketch)
    assert side.complete
    assert f"a sketch of rank {VOCABULARY}" in facts.why
    assert side.bound is not None
    # as wide as G, it misses nothing but what keeps it positive semidefinite
    assert relative_error(side.to_dense(torch.float64), exact) < 1e-5
    assert relative_error(side.diagonal(), exact.diagonal()) < 1e-5
    assert relative_error(found.load(facts.ordinal).A, truth.load(facts.ordinal).A) < 1e-5
    # exact for itself: what is lost is lost of the sketch
    again = space(language_model(tied=True), texts(), "dense", fisher=fisher)
    again.resume.chosen, again.options.woodbury = made.resume.chosen, Woodbury(approximate=True, sketch_rank=6)
    narrow = collect_or_read(again).load(facts.ordinal)
    assert isinstance(narrow.G, DiagonalSketch)
    product = float(narrow.A.diagonal().sum()) * narrow.G.trace()
    whole = truth.load(facts.ordinal)
    assert product == pytest.approx(float(whole.A.diagonal().sum() * exact.trace()), rel=1e-10)
    assert narrow.G.bound is not None
    assert narrow.G.approximate


def test_a_tied_head_is_never_sketched_where_that_is_not_allowed() -> None:
    made = space(language_model(tied=True), texts(), "dense", fisher="mc")
    names = tuple(layer.name for layer in collect_or_read(made).layers)
    again = space(language_model(tied=True), texts(), "dense", fisher="mc")
    again.resume.chosen = Chosen(parts=(names,), sketched=("transformer.wte",))
    again.options.woodbury = replace(again.options.woodbury, approximate=False)
    found = collect_or_read(again)
    assert {layer.representation_G for layer in found.layers} == {"dense"}
