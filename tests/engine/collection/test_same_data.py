"""Every later pass over the data lets the same examples enter as the first one, or ends the job with both figures.

The oracle is what was given: the same examples in another order, in other batches and with other padding must be
taken, and give what a list gives; any other must be refused.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog.requests.inputs import Task
from engine.collect import collect_or_read
from engine.errors import DataDiffer, EngineError
from engine.memory.plan import Chosen
from engine.model.batches import Batch
from engine.model.example_digests import EnteredExamples, digest_examples
from engine.workspace import Workspace
from kronoscope.local import Measurement, measure
from tests.oracles import MemoryArtifacts, workspace

CLASSES = Task(type="classification")
TOKENS = Task(type="masked_lm")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def examples() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(40, 6), torch.randint(3, (40,))


Change = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Makes the examples of one reading, which is counted from 0, of those of a list."""


class Source:
    """Data that every reading changes."""

    def __init__(self, change: Change) -> None:
        self.change, self.readings = change, 0

    def __call__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = self.change(self.readings, *examples())
        self.readings += 1
        yield from zip(x.split(8), y.split(8), strict=True)


def shuffled(reading: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(reading))
    return x[order], y[order]


def dropping(reading: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x, y = shuffled(reading, x, y)
    return x[:36], y[:36]


def augmented(reading: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x + 1e-6 * reading, y


def relabelled(reading: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, y.roll(reading)


def shorter(reading: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x[: 40 - reading], y[: 40 - reading]


def repeating(reading: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    order = torch.arange(40)
    order[reading] = order[-1]
    return x[order], y[order]


OTHERS = (dropping, augmented, relabelled, shorter, repeating)
SEARCHED = {"k": 1, "end": "largest", "density": False, "trace": "none"}
LATER: dict[str, dict[str, Any]] = {
    "correction": {"kinds": ("factors",), "collection": {"ekfac": True}},
    "gradient": {"kinds": ("natural_gradient",)},
    "cross-check": {"kinds": ("capacity",), "params": {"capacity": {"cross_check": "ggn"}}},
    "spectrum": {
        "kinds": ("spectrum",),
        "params": {"spectrum": {"of": ["ggn"], "k": 1, "end": "largest", "density": False, "trace": "none"}},
    },
    "sizes": {"kinds": ("factors",), "collection": {"nested": True}},
}


def run(data: Any, later: str, **options: Any) -> Measurement:
    given = dict(LATER[later])
    collection = {"batch_size": 8, "dtype": "float64", "fisher": "type2", "self_check": "off"}
    collection |= {**given.pop("collection", {}), **options}
    return measure(net(), data, task="classification", collection=collection, **given)


@pytest.mark.part(of=32, by=("later",))
@pytest.mark.parametrize(
    # smaller sizes are of one pass, whose examples are counted beforehand
    ("later", "change"),
    [(later, change) for later in LATER for change in OTHERS if later != "sizes" or change is shorter],
)
def test_a_later_pass_that_sees_others_ends_the_job_with_both_figures(later: str, change: Change) -> None:
    with pytest.raises(DataDiffer, match=r"must be the same at every pass") as refused:
        run(Source(change), later)
    assert (refused.value.category, refused.value.code, refused.value.pointer) == ("usage", "data_differ", "/data")
    figures = [word for word in str(refused.value).split() if word.isdecimal() and 30 <= int(word) <= 40]
    assert len(figures) == 2


def test_a_difference_ends_the_job_and_not_the_analysis_alone() -> None:
    with pytest.raises(DataDiffer, match="the gradient"):
        measure(net(), Source(augmented), task="classification", kinds=("factors", "natural_gradient"))


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("later", ["correction", "gradient", "cross-check", "spectrum"])
def test_another_order_gives_what_a_list_gives(later: str) -> None:
    ordered, other = run([examples()], later), run(Source(shuffled), later)
    for one, two in zip(ordered.layers, other.layers, strict=True):
        assert one.layer == two.layer
        torch.testing.assert_close(ordered.factors[one.layer].A, other.factors[one.layer].A)
        torch.testing.assert_close(ordered.factors[one.layer].G, other.factors[one.layer].G)


def test_where_the_order_of_batches_weighs_them_another_order_is_refused() -> None:
    run([examples()], "gradient", ema_decay=0.5)
    with pytest.raises(DataDiffer):
        run(Source(shuffled), "gradient", ema_decay=0.5)


def test_every_second_batch_of_another_order_is_other_data() -> None:
    run([examples()], "gradient", update_freq=2)
    with pytest.raises(DataDiffer, match="24 examples"):
        run(Source(shuffled), "gradient", update_freq=2)


def test_labels_that_every_product_draws_need_one_order_or_an_index() -> None:
    x, y = examples()
    asked: dict[str, Any] = {
        "task": "classification", "kinds": ("spectrum",), "params": {"spectrum": {"of": ["fisher"], **SEARCHED}},
        "collection": {"batch_size": 8, "dtype": "float64"},
    }  # fmt: skip
    with pytest.raises(DataDiffer, match="an index of its own"):
        measure(net(), Source(shuffled), **asked)
    readings = iter(range(1000))

    def numbered() -> Iterator[tuple[Tensor, ...]]:
        order = torch.randperm(40, generator=torch.Generator().manual_seed(next(readings)))
        yield from zip(x[order].split(8), y[order].split(8), order.split(8), strict=True)

    found, expected = measure(net(), numbered, **asked), measure(net(), [(x, y)], **asked)
    largest, wanted = (each.summary["spectrum"].curvatures[0].largest[0].value for each in (found, expected))
    assert largest == pytest.approx(wanted, rel=1e-9)
    torch.testing.assert_close(found.factors["0"].G, expected.factors["0"].G)


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("change", OTHERS)
def test_every_pass_of_a_collection_sees_what_the_first_saw(change: Change) -> None:
    def made(data: Any) -> Workspace:
        found = workspace(net(), [], "classification", fisher="mc", batch_size=8)
        found.inputs.batches = data
        found.ports.scratch = MemoryArtifacts()
        found.resume.chosen = Chosen(parts=(("0",), ("2",)))
        return found

    ordered = collect_or_read(made(lambda: iter([examples()])))
    warned: list[str] = []
    other = made(Source(shuffled))
    other.ports.notice = warned.append
    assert (ordered.passes, collect_or_read(other).passes) == (2, 2)
    assert any("another draw of the same labels" in each for each in warned)
    with pytest.raises(DataDiffer, match="pass 2 of the collection"):
        collect_or_read(made(Source(change)))


@pytest.mark.part(of=32, by=("ekfac",))
@pytest.mark.parametrize("wrapped", [lambda chunks: chunks, lambda chunks: map(tuple, chunks)])
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("ekfac", [False, True])
def test_data_that_can_be_read_only_once_are_refused(wrapped: Any, count: int, ekfac: bool) -> None:
    x, y = (each[: 8 * count] for each in examples())
    chunks = iter(list(zip(x.split(8), y.split(8), strict=True)))
    with pytest.raises(EngineError, match="read only once") as refused:
        measure(
            net(), lambda: wrapped(chunks), task="classification", kinds=("factors",),
            collection={"batch_size": 8, "ekfac": ekfac},
        )  # fmt: skip
    assert refused.value.code == "data_differ"


def entered(*batches: tuple[Any, Any], task: Task = CLASSES) -> EnteredExamples:
    """The digest of batches as one pass lets them enter."""
    total, seen = EnteredExamples(), 0
    for inputs, targets in batches:
        first = targets if isinstance(targets, Tensor) else next(iter(inputs.values()))
        index = torch.arange(seen, seen + len(first))
        seen += len(first)
        total = total.added(Batch(inputs=inputs, targets=targets, index=index), task, None)
    return total


def padded(texts: list[Tensor], *, left: bool, length: int, filler: int) -> tuple[dict[str, Tensor], Tensor]:
    """Texts of token ids padded on one side, and a target for each token."""
    ids, mask = torch.full((len(texts), length), filler), torch.zeros(len(texts), length, dtype=torch.int64)
    embedded, labels = torch.full((len(texts), length, 3), float(filler)), torch.full((len(texts), length), -100)
    for row, text in enumerate(texts):
        place = slice(length - len(text), length) if left else slice(0, len(text))
        ids[row, place], mask[row, place], labels[row, place] = text, 1, text % 5
        embedded[row, place] = torch.stack([text, text * 2, text * 3], 1).float()
    return {"input_ids": ids, "attention_mask": mask, "extra": embedded}, labels


def test_padding_is_no_part_of_an_example() -> None:
    texts = [torch.tensor(each) for each in ([5, 6, 0], [7, 0, 8, 9], [1], [0, 0])]
    expected = entered(padded(texts, left=False, length=4, filler=0), task=TOKENS)
    for left in (False, True):
        parts = padded(texts[2:], left=left, length=9, filler=3), padded(texts[:2], left=left, length=4, filler=1)
        assert entered(*parts, task=TOKENS).content == expected.content
    others = [*texts[:3], torch.tensor([0, 0, 0])]
    assert entered(padded(others, left=False, length=4, filler=0), task=TOKENS).content != expected.content
    # without a mask the model sees the padding
    x = torch.ones(2, 3)
    y = torch.tensor([0, 1])
    assert entered((x, y)) != entered((torch.cat([x, torch.zeros(2, 1)], 1), y))


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16,
                                   torch.float32, torch.float64, torch.complex64])  # fmt: skip
def test_any_single_number_counts(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = torch.randint(2, (6, 5)).to(dtype), torch.arange(6)
    whole = entered((x, y))
    assert entered((x[:2], y[:2]), (x[2:], y[2:])) == whole
    assert whole.content == entered((x.flip(0), y.flip(0))).content
    assert entered((x.T.contiguous().T, y)) == whole
    contents = {whole.content}
    for row in range(6):
        for column in range(5):
            other = x.clone()
            other[row, column] = 1 - other[row, column].to(torch.complex64).real
            contents.add(entered((other, y)).content)
    assert len(contents) == 31


def test_examples_that_exchange_a_part_are_others() -> None:
    torch.manual_seed(0)
    a, b, y = torch.randn(4, 3), torch.randint(9, (4, 2)), torch.arange(4)
    whole = entered(({"a": a, "b": b}, y)).content
    order = torch.tensor([1, 0, 2, 3])
    assert whole == entered(({"b": b[order], "a": a[order]}, y[order])).content
    binary = torch.eye(4)
    others = [
        entered(({"a": a[order], "b": b}, y)),
        entered(({"a": a, "b": b}, y[order])),
        entered(((a, b), y)),
        entered(({"a": a, "c": b}, y)),
        entered(({"a": a.double(), "b": b}, y)),
        entered((binary, y)),
        entered((binary[order], y)),
        entered(({"a": a, "b": b, "flag": True}, y)),
        entered(({"a": a, "b": b, "flag": False}, y)),
        entered(((a, a.roll(1, 0)), y)),
        entered(((a.roll(1, 0), a), y)),
    ]
    assert len({whole, *(each.content for each in others)}) == len(others) + 1


def test_a_column_of_a_table_is_digested_where_there_is_one_example_or_one_feature() -> None:
    """A dimension of one number has the stride of what it was cut from."""
    table = torch.arange(12).view(4, 3)
    for column in (table[:1, 0], table[:, 0], torch.linspace(0, 1, 4)[None].T):
        own = Batch(inputs=column, targets=column, index=torch.arange(len(column)))
        rows = column.clone(memory_format=torch.contiguous_format)
        copied = Batch(inputs=rows, targets=rows, index=own.index)
        assert torch.equal(digest_examples(own, CLASSES), digest_examples(copied, CLASSES))


def test_digests_are_per_example() -> None:
    x, y = examples()
    found = digest_examples(Batch(inputs=x, targets=y, index=torch.arange(40)), CLASSES)
    assert found.shape == (40,)
    assert len(set(found.tolist())) == 40
    sparse = digest_examples(Batch(inputs=x.to_sparse(), targets=y, index=torch.arange(40)), CLASSES)
    assert torch.equal(found, sparse)
