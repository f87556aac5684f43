"""Columns of data: what a document names is read, labels are those of ``transformers``, and images have their scale."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from torch import nn

from catalog.record import FieldError
from catalog.requests.data_sources import DataFile, Pixels
from catalog.requests.inputs import DirectoryModel, HuggingFaceData, Task
from engine.errors import WrongShape
from kronoscope.local import OptionRefused, measure
from worker.execution.data import file, huggingface
from worker.execution.data.labels import class_names
from worker.execution.data.stream import DataRequest
from worker.execution.loaded_model import LoadedModel, Vocabulary
from worker.execution.loader_context import LoaderContext
from worker.execution.models.checkpoint import load
from worker.execution.refusal import Refusal

ONE = ["a man is playing a guitar", "it rains, today", 'he said "no"', "short"]
OTHER = ["someone makes music in the street", "the sun shines", "a line", "true"]
GOLD = ["entailment", "contradiction", "neutral", "entailment"]
NAMES: Any = {
    "id2label": {0: "contradiction", 1: "entailment", 2: "neutral"},
    "label2id": {"contradiction": 0, "entailment": 1, "neutral": 2},
}
BYTES = Vocabulary(size=256, max_length=16, tokenizer=None)
FACTORS: Any = {"kinds": ("factors",), "collection": {"dtype": "float64", "fisher": "type2", "self_check": "off"}}


class Read:
    """A source that was read, with what the loader said."""

    def __init__(self, context: LoaderContext, loaded: LoadedModel, task: str = "sequence_classification") -> None:
        self.unused: list[str] = []
        self.notices: list[str] = []
        self.reading: dict[str, Any] = {}
        own = replace(context, note=self.notices.append, unused=self.unused.append, describe=self.reading.__setitem__)
        self.request = DataRequest(task=Task(type=task), loaded=loaded, batch_size=8, seed=0, context=own)  # type: ignore[arg-type]

    def file(self, path: Path, **more: Any) -> Any:
        (chunk,) = file.load(DataFile(source="file", path=str(path), **more), self.request).batches()
        return chunk


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, minilm: Path) -> Path:
    """A small classifier of pairs whose classes have names, with a real tokenizer, which no test changes."""
    model = tmp_path_factory.mktemp("classifier") / "model"
    config = transformers.BertConfig(
        num_hidden_layers=1, num_attention_heads=2, hidden_size=8, intermediate_size=16, max_position_embeddings=64,
        **NAMES,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(minilm / name, model / name)
    return model


@pytest.fixture(scope="module")
def classifier(folder: Path, store: Path) -> LoadedModel:
    source = DirectoryModel(source="directory", path=str(folder))
    return load(source, Task(type="sequence_classification"), LoaderContext(store=store))


def table(path: Path, **columns: list[Any]) -> Path:
    made = datasets.Dataset.from_dict(columns)
    {".parquet": made.to_parquet, ".jsonl": made.to_json, ".csv": made.to_csv}[path.suffix](str(path))
    return path


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
def test_named_columns_are_the_tokens_labels_and_factors_of_transformers(
    tmp_path: Path, folder: Path, classifier: LoadedModel, context: LoaderContext, suffix: str
) -> None:
    path = table(tmp_path / f"rows.{suffix}", first=ONE, second=OTHER, gold=GOLD, id=[1, 2, 3, 4])
    read = Read(context, classifier)
    inputs, targets, _ = read.file(path, text_key="first", pair_key="second", label_key="gold")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    twin = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    expected = dict(tokenizer(ONE, OTHER, padding=True, return_tensors="pt"))
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert torch.equal(inputs[name], expected[name])
    assert int(inputs["token_type_ids"].max()) == 1
    assert targets.tolist() == [twin.config.label2id[name] for name in GOLD]
    assert read.unused == [f"`id` of rows.{suffix}"]
    assert read.notices == []
    numbers = {"contradiction": 0, "entailment": 1, "neutral": 2}
    assert read.reading == {
        "columns": {"text": "first", "pair": "second", "label": "gold"},
        "labels": {"order": "id2label", "names": 3, "numbers": numbers},
    }
    expected["position_ids"] = inputs["position_ids"]
    labels = torch.tensor([twin.config.label2id[name] for name in GOLD])
    ours, theirs = (
        measure(model, [(given, y)], task="sequence_classification", **FACTORS).of("factors")
        for model, given, y in ((classifier.model, inputs, targets), (twin, expected, labels))
    )
    assert {name: row.metrics for name, row in ours.items()} == {name: row.metrics for name, row in theirs.items()}


@pytest.mark.part(of=16, by=())  # each kind of file is read by the test above
@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
def test_usual_names_need_no_key_and_every_file_is_read_alike(
    tmp_path: Path, classifier: LoadedModel, context: LoaderContext, suffix: str
) -> None:
    keys = {"text_key": "premise", "pair_key": "hypothesis", "label_key": "label"}
    path = table(tmp_path / f"rows.{suffix}", premise=ONE, hypothesis=OTHER, label=[2, 0, 1, 1])
    usual, named = Read(context, classifier), Read(context, classifier)
    (one, labels, _), (other, same, _) = usual.file(path), named.file(path, **keys)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert labels.tolist() == same.tolist() == [2, 0, 1, 1]
    assert usual.reading == named.reading == {"columns": {"text": "premise", "pair": "hypothesis", "label": "label"}}
    limited, *_ = Read(context, classifier).file(path, limit=2)
    assert len(limited["input_ids"]) == 2
    with pytest.raises(Refusal, match="`pair_key: hypothesis`") as refused:
        Read(context, classifier).file(path, text_key="premise")
    assert refused.value.pointer == "/data/pair_key"
    with pytest.raises(Refusal, match=r"there is no `x`; there are `premise`, `hypothesis`, `label`") as refused:
        Read(context, classifier).file(path, text_key="premise", pair_key="hypothesis", label_key="x")
    assert refused.value.pointer == "/data/label_key"


def test_upper_case_in_a_suffix_is_the_same_kind_of_file(
    tmp_path: Path, classifier: LoadedModel, context: LoaderContext
) -> None:
    read = []
    for name in ("rows.csv", "ROWS.CSV"):
        path = table(tmp_path / "rows.csv", text=ONE, label=[2, 0, 1, 1]).rename(tmp_path / name)
        read.append(Read(context, classifier).file(path))
    ambiguous = Read(context, replace(classifier, class_names=("1", "0", "2")))
    with pytest.raises(Refusal, match="name of class 1; give JSON lines"):
        ambiguous.file(path)
    assert torch.equal(read[0][1], read[1][1])


@pytest.mark.parametrize("name", ["~nosuchuser/x.jsonl", "x" * 300, "a/" + "x" * 300])
def test_a_data_set_of_an_odd_name_is_refused(name: str, classifier: LoadedModel, context: LoaderContext) -> None:
    source = HuggingFaceData(source="huggingface", id=name, input_column="text")
    with pytest.raises((Refusal, FieldError)) as refused:
        huggingface.load(source, Read(context, classifier).request)
    assert refused.value.pointer == "/data/id" if isinstance(refused.value, Refusal) else True


def test_a_data_set_reads_names_of_classes_too(tmp_path: Path, classifier: LoadedModel, context: LoaderContext) -> None:
    table(tmp_path / "train.parquet", line=ONE, gold=GOLD)
    source = HuggingFaceData(
        source="huggingface", id=str(tmp_path / "train.parquet"), input_column="line", target_column="gold"
    )
    ((_, targets, _),) = huggingface.load(source, Read(context, classifier).request).batches()
    assert targets.tolist() == [1, 0, 2, 1]


READINGS: dict[str, tuple[list[Any], tuple[str, ...], Any]] = {
    "numbers": ([1, 0], ("a", "b"), [1, 0]),
    "texts of numbers": (["1", "0", "01"], (), [1, 0, 1]),
    "names": (["b", "a"], ("a", "b"), [1, 0]),
    "names that are numbers": (["1", "2"], ("1", "2"), [0, 1]),
    "names of transformers": (["LABEL_1", "LABEL_0"], ("LABEL_0", "LABEL_1"), [1, 0]),
    "sorted": (["b", "ä", "B", "a"], (), [2, 3, 0, 1]),
    "sorted, of a model that counts": (["pos", "neg"], ("LABEL_0", "LABEL_1"), [1, 0]),
    "too few for the model": (["pos", "neg"], ("LABEL_0", "LABEL_1", "LABEL_2"), "2 names, .* model has 3 classes"),
    "another name": (["a", "B"], ("a", "b"), r"line 2: `label` is `B`, and the model's classes are `a`, `b`"),
    "a number among names": (["a", 1], ("a", "b"), "the text `a` in rows.jsonl line 1 and a number in .* line 2"),
    "a text of a number": (["a", "1"], (), "is `1` in rows.jsonl line 2 and `a` in rows.jsonl line 1"),
    "a fraction": (["1.5", "1"], (), r"line 1: `label` must be a class index.*got 1\.5"),
    "not a number": (["nan", "1"], (), "line 1: `label` must be a finite number"),
    "sorted, with a line below": (["1_0", "0_1"], (), [1, 0]),
    "sorted, digits of another script": (["٢", "١"], (), [1, 0]),
    "nothing": (["a", " "], (), r"line 2: `label` is ' '; a class is"),
    "a long one": (["a", "x" * 101], (), "line 2: `label` has 101 characters"),
    "half of a pair": (["a", "\ud800"], (), "line 2: `label` is"),
    "none": (["a", None], (), "line 2: `label` must be a number .got None"),
    "truth": ([True, False], (), r"must be a number \(got True\)"),
}


@pytest.mark.parametrize("kind", list(READINGS))
def test_labels_are_numbers_or_names_and_nothing_is_guessed(tmp_path: Path, context: LoaderContext, kind: str) -> None:
    labels, known, expected = READINGS[kind]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": "ab", "label": label}) + "\n" for label in labels))
    read = Read(context, LoadedModel(model=nn.Linear(3, 2), vocabulary=BYTES, class_names=known))
    if isinstance(expected, str):
        with pytest.raises(Refusal, match=expected):
            read.file(path)
        return
    _, targets, _ = read.file(path)
    assert targets.tolist() == expected
    assert [" is " in each or "are numbered in sorted order" in each for each in read.notices] == (
        [True] if kind.startswith("sorted") else []
    )
    if kind.startswith("sorted"):
        assert read.reading["labels"]["numbers"] == {name: n for n, name in enumerate(sorted(labels))}


def written(path: Path, rows: list[tuple[Any, ...]]) -> Path:
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([("text", "label"), *rows])
    return path


def test_a_csv_does_not_say_whether_1_is_a_number_or_a_name(tmp_path: Path, context: LoaderContext) -> None:
    path = written(tmp_path / "rows.csv", [("ab", 2), ("cd", 1)])
    stars = LoadedModel(model=nn.Linear(3, 2), vocabulary=BYTES, class_names=("1", "2", "3"))
    with pytest.raises(Refusal, match="number of one class and, by `id2label`, the name of class 1; give JSON lines"):
        Read(context, stars).file(path)
    plain = replace(stars, class_names=("0", "1", "2"))
    assert Read(context, plain).file(path)[1].tolist() == [2, 1]
    truth = written(tmp_path / "truth.csv", [("ab", "true"), ("cd", "false")])
    assert Read(context, replace(stars, class_names=("false", "true"))).file(truth)[1].tolist() == [1, 0]
    read = Read(context, stars, "regression")
    assert read.file(written(tmp_path / "numbers.csv", [("ab", 0.25), ("cd", 3)]))[1].tolist() == [0.25, 3.0]
    with pytest.raises(Refusal, match="row 1: `label` must be a number"):
        Read(context, plain).file(written(tmp_path / "gap.csv", [("ab", 1), ("cd", "")]))


AS_WRITTEN: dict[str, tuple[list[str], tuple[str, ...], Any]] = {
    "names with leading zeros": (["01", "02"], ("01", "02", "03"), "holds 01, which is the number of one class"),
    "names with a point": (["1.0", "2.0"], ("1.0", "2.0", "3.0"), r"holds 1\.0, which is the number of one class"),
    "numbers with a point, of names without": (["1.0", "2.0"], ("1", "2", "3"), "name of class 0; give JSON lines"),
    "a number beside one that is a name": (["0", "1"], ("1", "2", "3"), "name of class 0; give JSON lines"),
    "names that no number is": (["00x", "01x"], ("00x", "01x"), [0, 1]),
    "names between classes": (["1.5", "0.5"], ("0.5", "1.5"), [1, 0]),
    "names that are dates": (["2024-05-01", "2024-04-01"], (), [1, 0]),
    "numbers with a point": (["1.0", "0.0"], ("a", "b"), [1, 0]),
    "numbers after a blank": ([" 1", " 0"], ("a", "b"), [1, 0]),
    "nothing among names": (["a", ""], ("a", "b"), "row 1: `label` is ''; a class is"),
    "nothing at first": (["", "1"], ("a", "b"), "row 0: `label` must be a number"),
}


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("kind", list(AS_WRITTEN))
def test_labels_of_a_csv_are_read_as_they_are_written(tmp_path: Path, context: LoaderContext, kind: str) -> None:
    labels, known, expected = AS_WRITTEN[kind]
    path = written(tmp_path / "rows.csv", [("ab", label) for label in labels])
    read = Read(context, LoadedModel(model=nn.Linear(3, 2), vocabulary=BYTES, class_names=known))
    if isinstance(expected, str):
        with pytest.raises(Refusal, match=expected) as refused:
            read.file(path)
        assert refused.value.pointer == "/data/label_key"
    else:
        assert read.file(path)[1].tolist() == expected


@pytest.mark.parametrize(
    ("task", "many", "last", "expected"), [("regression", "3", "0.5", 0.5), ("sequence_classification", "1", "1.0", 1)]
)
def test_a_label_far_down_a_csv_may_look_otherwise_than_the_first(
    tmp_path: Path, context: LoaderContext, task: str, many: str, last: str, expected: float
) -> None:
    # the library reads 4 MiB at a time
    path = written(tmp_path / "rows.csv", [("x" * 2**16, many)] * 70 + [("ab", last)])
    read = Read(context, LoadedModel(model=nn.Linear(3, 2), vocabulary=BYTES), task)
    stream = file.load(DataFile(source="file", path=str(path)), read.request)
    targets = torch.cat([chunk[1] for chunk in stream.batches()])
    assert targets.tolist() == [int(many)] * 70 + [expected]


def test_a_score_of_a_csv_that_is_no_number_is_refused(tmp_path: Path, context: LoaderContext) -> None:
    read = Read(context, LoadedModel(model=nn.Linear(3, 2), vocabulary=BYTES), "regression")
    for score, said in (("much", "'much'"), ("NA", "'NA'"), ("", "None")):
        path = written(tmp_path / "rows.csv", [("ab", "1"), ("cd", score)])
        with pytest.raises(Refusal, match=rf"row 1: `label` must be a number \(got {said}\)"):
            read.file(path)


def test_tags_by_name_are_those_of_the_model(tmp_path: Path, minilm: Path, context: LoaderContext) -> None:
    tokenizer = Vocabulary(
        size=30_522, max_length=64, tokenizer=load(
            DirectoryModel(source="directory", path=str(minilm)), Task(type="sentence_embedding"), context
        ).vocabulary.tokenizer, arguments=frozenset({"input_ids", "attention_mask"}),
    )  # type: ignore[union-attr] # fmt: skip
    loaded = LoadedModel(model=nn.Linear(3, 2), vocabulary=tokenizer, class_names=("O", "B-PER"))
    table(tmp_path / "rows.parquet", tokens=[["Ada", "wrote"], ["rain"]], ner=[["B-PER", "O"], ["O"]])
    numbers = tmp_path / "rows.jsonl"
    numbers.write_text('{"words": ["Ada", "wrote"], "tags": [1, 0]}\n{"words": ["rain"], "tags": [0]}\n')
    read = Read(context, loaded, "token_classification")
    _, named, _ = read.file(tmp_path / "rows.parquet", text_key="tokens", label_key="ner")
    _, numbered, _ = Read(context, loaded, "token_classification").file(numbers)
    assert torch.equal(named, numbered)
    assert read.reading["labels"]["numbers"] == {"O": 0, "B-PER": 1}


@pytest.mark.part(of=16, by=())  # what counts is given the texts, whatever they were read from
@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_column_of_texts_that_all_differ_is_refused_as_it_comes(
    tmp_path: Path, context: LoaderContext, suffix: str
) -> None:
    """A column of a hundred thousand names and more ends the reading, whatever follows it."""
    labels = [f"n{number}" for number in range(100_200)]
    path = table(tmp_path / f"rows.{suffix}", text=["ab"] * len(labels), label=labels)
    read = Read(context, LoadedModel(model=nn.Linear(3, 2), vocabulary=BYTES))
    where = "rows.jsonl line 100001" if suffix == "jsonl" else "row 100000"
    with pytest.raises(Refusal, match=f"{where}: `label` has more than 100,000 texts that differ"):
        read.file(path)
    with pytest.raises(Refusal, match=r"1,001 names, .*at most 1,000 are numbered"):
        Read(context, read.request.loaded).file(path, limit=1_001)


def test_names_of_classes_are_whole_or_none() -> None:
    assert class_names({"1": "b", "0": "a"}) == class_names({1: "b", 0: "a"}) == ("a", "b")
    for broken in (
        None,
        [],
        "ab",
        {},
        {"0": "a", "2": "b"},
        {"0": "a", "1": "a"},
        {"0": 1},
        {"0": "x" * 101},
        {"x": "a"},
    ):
        assert class_names(broken) == ()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"path": "a.txt", "text_key": "x"}, "text_key"),
        ({"path": "a.safetensors", "label_key": "x"}, "label_key"),
        ({"path": "a.csv", "pair_key": "x"}, "pair_key"),
        ({"path": "a.csv", "text_key": "x", "label_key": "x"}, "label_key"),
        ({"path": "a.csv", "pixels": Pixels(scale=1.0)}, "pixels"),
    ],
)
def test_keys_without_a_column_are_refused_by_field(options: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as refused:
        DataFile(source="file", **options)
    assert refused.value.field == field


IMAGES = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 1, 2, 0, 1, 2])
NUMBERS: Any = {"scale": 1 / 255, "mean": (0.48, 0.46, 0.41), "deviation": (0.23, 0.22, 0.225)}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 2, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3))


def test_images_of_the_converter_are_scaled_as_transformers_scales_them(tmp_path: Path, context: LoaderContext) -> None:
    path = tmp_path / "train.safetensors"
    safetensors.torch.save_file({"images": IMAGES, "labels": CLASSES}, path)
    processor = transformers.ViTImageProcessor(
        do_resize=False, image_mean=NUMBERS["mean"], image_std=NUMBERS["deviation"], rescale_factor=NUMBERS["scale"]
    )
    expected = processor(list(IMAGES), return_tensors="pt")["pixel_values"]
    read = Read(context, LoadedModel(model=net(), input_name="pixel_values"), "classification")
    inputs, targets = read.file(path, pixels=Pixels(**NUMBERS))
    torch.testing.assert_close(inputs["pixel_values"], expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(targets, CLASSES)
    assert read.reading["pixels"] == NUMBERS | {"mean": list(NUMBERS["mean"]), "deviation": list(NUMBERS["deviation"])}
    as_they_are, _ = Read(context, LoadedModel(model=net()), "classification").file(path)
    assert torch.equal(as_they_are, IMAGES)


def test_uint8_arrays_with_a_scale_are_the_floats_of_torch() -> None:
    mean, deviation = (torch.tensor(NUMBERS[name]).view(-1, 1, 1) for name in ("mean", "deviation"))
    floats = (IMAGES.float() * NUMBERS["scale"] - mean) / deviation
    expected = measure(net(), (floats, CLASSES), task="classification", **FACTORS).of("factors")
    dataset = torch.utils.data.TensorDataset(IMAGES, CLASSES)
    for given in ((IMAGES.numpy(), CLASSES.numpy()), dataset, lambda: iter([(IMAGES, CLASSES)])):
        found = measure(net(), given, task="classification", pixels=NUMBERS, **FACTORS).of("factors")
        assert {name: row.metrics for name, row in found.items()} == {n: row.metrics for n, row in expected.items()}


@pytest.mark.parametrize(
    ("pixels", "said"),
    [
        ({"scale": 0.0}, "take a number above 0"),
        ({"scale": 1.0, "mean": (0.5, 0.5)}, r"holds 2 numbers, and images of shape \(3, 8, 8\) have 3 channels"),
        ({"scale": 1.0, "deviation": (1.0, 0.0, 1.0)}, "above 0"),
        ({"scale": 1.0, "mean": ()}, "holds 0 numbers"),
        ({}, "scale"),
    ],
)
def test_a_scale_that_cannot_be_is_refused(pixels: dict[str, Any], said: str) -> None:
    with pytest.raises((WrongShape, OptionRefused), match=said):
        measure(net(), (IMAGES, CLASSES), task="classification", pixels=pixels, **FACTORS)


def test_a_scale_of_what_are_no_bytes_is_refused(tmp_path: Path, context: LoaderContext) -> None:
    with pytest.raises(WrongShape, match="`pixels` are of uint8 images"):
        measure(net(), (np.zeros((6, 3, 8, 8), "float32"), CLASSES), task="classification", pixels={"scale": 1.0})
    path = tmp_path / "data.safetensors"
    safetensors.torch.save_file({"inputs": torch.zeros(2, 3), "targets": torch.zeros(2, dtype=torch.int64)}, path)
    with pytest.raises(Refusal, match="holds `inputs` of type F32") as refused:
        Read(context, LoadedModel(model=nn.Linear(3, 2)), "classification").file(path, pixels=Pixels(scale=1.0))
    assert refused.value.pointer == "/data/pixels"
