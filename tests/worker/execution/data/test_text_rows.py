"""Every field of a row of texts is read, refused, or listed; pairs are what transformers' tokenizer makes of them."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import pytest
import safetensors.torch
import torch
import transformers

from catalog.record import FieldError
from catalog.requests.data_sources import DataFile, UploadedData
from catalog.requests.inputs import DirectoryModel, HuggingFaceData, Task
from worker.execution.data import builtin, file, huggingface
from worker.execution.data.stream import DataRequest
from worker.execution.data.texts.text_rows import PAIRS
from worker.execution.loaded_model import LoadedModel, Vocabulary
from worker.execution.loader_context import LoaderContext
from worker.execution.models.checkpoint import load
from worker.execution.refusal import Refusal

ONE = ["a man is playing a guitar", "it rains", "the third premise of them all is rather long, and has a comma"]
OTHER = ["someone makes music in the street", "the sun shines", "short"]
LABELS = [0, 2, 1]


class Read:
    """A file that was read, with what the loader said."""

    def __init__(self, context: LoaderContext, loaded: LoadedModel, task: str) -> None:
        self.unused: list[str] = []
        self.notices: list[str] = []
        own = replace(context, note=self.notices.append, unused=self.unused.append)
        self.request = DataRequest(task=Task(type=task), loaded=loaded, batch_size=4, seed=0, context=own)  # type: ignore[arg-type]

    def file(self, path: Path, **more: Any) -> Any:
        stream = file.load(DataFile(source="file", path=str(path), **more), self.request)
        (chunk,) = stream.batches()
        return chunk

    def table(self, path: Path, **more: Any) -> Any:
        stream = huggingface.load(HuggingFaceData(source="huggingface", id=str(path), **more), self.request)
        (chunk,) = stream.batches()
        return chunk


@pytest.fixture(scope="module")
def encoder(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """The real encoder, which no test changes."""
    context = LoaderContext(store=tmp_path_factory.mktemp("store"))
    return load(DirectoryModel(source="directory", path=str(minilm)), Task(type="sentence_embedding"), context)


@pytest.fixture
def reading(context: LoaderContext, encoder: LoadedModel) -> Callable[..., Read]:
    return lambda task="sequence_classification", loaded=encoder: Read(context, loaded, task)


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", "no object"), ("a.csv", "a,b\n1,2\n"), ("a.txt", "")])
def test_a_fault_of_an_upload_names_its_id(
    reading: Callable[..., Read], tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / "sent").mkdir()
    (tmp_path / "sent" / name).write_text(content)
    request = reading(task="sentence_embedding" if name.endswith("txt") else "sequence_classification").request
    sent = replace(request, context=replace(request.context, data_path=tmp_path / "sent"))
    with pytest.raises(Refusal) as refused:
        file.load_uploaded(UploadedData(source="upload", id="1"), sent)
    assert refused.value.pointer == "/data/id"


def lines(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pairs(one: str, other: str, **more: Any) -> list[dict[str, Any]]:
    return [{one: a, other: b, "label": c, **more} for a, b, c in zip(ONE, OTHER, LABELS, strict=True)]


@cache
def tokenizer_of(folder: Path) -> Any:
    """The library's own, read once a folder."""
    return transformers.AutoTokenizer.from_pretrained(folder)


def require_tokens_of(minilm: Path, inputs: dict[str, torch.Tensor], **options: Any) -> None:
    tokenizer = tokenizer_of(minilm)
    expected = tokenizer(ONE, OTHER, padding=True, return_tensors="pt", **options)
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert torch.equal(inputs[name], expected[name])


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_both_halves_of_a_pair_are_read_as_transformers_joins_them(
    tmp_path: Path, minilm: Path, reading: Callable[..., Read], one: str, other: str
) -> None:
    read = reading()
    inputs, targets, _ = read.file(lines(tmp_path, pairs(one, other)))
    require_tokens_of(minilm, inputs)
    assert targets.tolist() == LABELS
    assert (read.unused, read.notices) == ([], [])
    read = reading()
    inputs, *_ = read.file(lines(tmp_path, pairs(one, other)), sequence_length=12)
    require_tokens_of(minilm, inputs, truncation=True, max_length=12)
    assert len(read.notices) == 1
    assert read.notices[0].endswith("longer than 12 tokens and are cut there: `sequence_length`, which can be raised")


def test_the_model_sees_which_half_a_token_is_of(tmp_path: Path, minilm: Path, reading: Callable[..., Read]) -> None:
    inputs, *_ = reading().file(lines(tmp_path, pairs("premise", "hypothesis")))
    model = transformers.AutoModel.from_pretrained(minilm).eval()
    tokenizer = tokenizer_of(minilm)
    given = tokenizer(ONE, OTHER, padding=True, return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs)[0], model(**given)[0])


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("suffix", ["parquet", "csv", "jsonl"])
def test_pairs_of_a_table_are_read_or_refused(
    tmp_path: Path, minilm: Path, reading: Callable[..., Read], suffix: str
) -> None:
    table = datasets.Dataset.from_dict({"sentence1": ONE, "sentence2": OTHER, "label": LABELS, "idx": [4, 5, 6]})
    path = tmp_path / f"train.{suffix}"
    {"parquet": table.to_parquet, "jsonl": table.to_json, "csv": table.to_csv}[suffix](str(path))
    named: dict[str, Any] = {"input_column": "sentence1", "target_column": "label"}
    with pytest.raises(Refusal, match="`pair_column: sentence2`") as refused:
        reading().table(tmp_path, **named)
    assert refused.value.pointer == "/data/pair_column"
    read = reading()
    inputs, targets, _ = read.table(tmp_path, pair_column="sentence2", **named)
    require_tokens_of(minilm, inputs)
    assert targets.tolist() == LABELS
    assert read.unused == [f"`idx` of {tmp_path}"]
    with pytest.raises(Refusal, match="`absent` is not a column"):
        reading().table(tmp_path, pair_column="absent", **named)
    read = reading("masked_lm")
    read.table(tmp_path, input_column="sentence1")
    assert f"`sentence2` of {tmp_path}" in read.unused
    assert any("the other half of a pair" in each for each in read.notices)
    with pytest.raises(FieldError, match="which another field names"):
        HuggingFaceData(source="huggingface", id="x", pair_column="text")


def test_files_of_another_split_are_listed_and_a_split_that_no_file_has_is_a_notice(
    tmp_path: Path, reading: Callable[..., Read]
) -> None:
    for name in ("train", "validation"):
        datasets.Dataset.from_dict({"text": ONE}).to_json(str(tmp_path / f"{name}.jsonl"))
    read = reading("masked_lm")
    read.table(tmp_path)
    assert read.unused == [f"file `validation.jsonl` of {tmp_path.name}"]
    assert read.notices == []
    (tmp_path / "train.jsonl").rename(tmp_path / "test.jsonl")
    read = reading("masked_lm")
    stream = huggingface.load(HuggingFaceData(source="huggingface", id=str(tmp_path)), read.request)
    assert stream.examples == 6
    assert any("so all 2 are read" in each for each in read.notices)


FOLDERS: dict[str, tuple[str, list[str], list[str]]] = {
    "copies of an editor": (
        "train",
        ["train.csv"],
        [".ipynb_checkpoints/train-checkpoint.csv", "__MACOSX/._train.csv"],
    ),
    "a word that ends alike": ("train", ["train.jsonl"], ["pretrain.jsonl"]),
    "a word within another": ("test", ["test.csv"], ["latest.csv", "contest.csv", "train.csv"]),
    "a folder for each split": ("train", ["train/0.jsonl", "train/1.jsonl"], ["test/0.jsonl", "pretrain/0.jsonl"]),
    "a folder of both": ("train", ["train-test/train.jsonl"], ["train-test/test.jsonl"]),
    "shards": ("train", ["data/train-00000-of-00002.csv", "data/train-00001-of-00002.csv"], ["data/test-00000.csv"]),
    "counted": ("train", ["my_train1.csv", "train2.csv"], ["test1.csv"]),
    "words of the library": ("train", ["training.csv"], ["testing.csv"]),
    "short words of the library": ("val", ["validation.jsonl"], ["interval.jsonl"]),
    "a short split": ("dev", ["dev.jsonl"], ["device.jsonl"]),
    "a part": ("fold1", ["fold1.csv"], ["fold10.csv", "fold11.csv"]),
}


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize("kind", list(FOLDERS))
def test_the_files_of_a_split_are_those_that_have_its_name_as_a_word(
    tmp_path: Path, reading: Callable[..., Read], kind: str
) -> None:
    split, chosen, others = FOLDERS[kind]
    for name in (*chosen, *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text\nab\n" if name.endswith("csv") else '{"text": "ab"}\n')
    read, logged = reading("masked_lm"), list[str]()
    read.request = replace(
        read.request, context=replace(read.request.context, log=lambda _, message: logged.append(message))
    )
    source = HuggingFaceData(source="huggingface", id=str(tmp_path), split=split)
    assert huggingface.load(source, read.request).examples == len(chosen)
    assert sorted(read.unused) == sorted(f"file `{name}` of {tmp_path.name}" for name in others)
    assert read.notices == []
    said = f"{len(chosen)} files of {tmp_path.name} are read: {', '.join(f'`{name}`' for name in chosen)}"
    assert logged == ([said] if len(chosen) > 1 else [])


def test_a_csv_of_another_split_leaves_the_labels_of_json_their_types(
    tmp_path: Path, reading: Callable[..., Read], encoder: LoadedModel
) -> None:
    (tmp_path / "test.csv").write_text("text,label\nab,1\n")
    (tmp_path / "train.jsonl").write_text('{"text": "ab", "label": 1}\n{"text": "cd", "label": 2}\n')
    read = reading(loaded=replace(encoder, class_names=("1", "2", "3")))
    assert read.table(tmp_path, target_column="label")[1].tolist() == [1, 2]
    (tmp_path / "train.jsonl").write_text('{"text": "ab", "label": "1"}\n')
    with pytest.raises(Refusal, match=r"row 0: `label` must be a number \(got '1'\)"):
        reading("regression").table(tmp_path, target_column="label")


def test_every_other_key_of_a_line_is_listed(tmp_path: Path, reading: Callable[..., Read]) -> None:
    rows = [{"text": "a text", "label": 0, "id": 3, "weight": 2.0}, {"text": "another", "label": 1, "source": "web"}]
    read = reading()
    read.file(lines(tmp_path, rows))
    assert read.unused == [f"`{name}` of rows.jsonl" for name in ("id", "weight", "source")]
    assert read.notices == ["`weight` of rows.jsonl is not read: every example counts once"]
    read = reading("masked_lm")
    read.file(lines(tmp_path, rows))
    assert "`label` of rows.jsonl" in read.unused


@pytest.mark.part(of=16, by=("suffix",))
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("task", ["masked_lm", "sentence_embedding"])
def test_a_label_that_the_task_does_not_use_may_be_anything(
    tmp_path: Path, reading: Callable[..., Read], task: str, suffix: str
) -> None:
    for name, values in {"label": [None, None], "labels": [[0, 1], [2]], "target": [True, False]}.items():
        rows = [{"text": text, name: value} for text, value in zip(ONE, values, strict=False)]
        path = lines(tmp_path, rows)
        if suffix == "parquet":
            path = tmp_path / "rows.parquet"
            datasets.Dataset.from_list(rows).to_parquet(str(path))
        read = reading(task)
        assert len(read.file(path)[0]["input_ids"]) == 2
        assert read.unused == [f"`{name}` of {path.name}"]
    # not every line needs one
    assert len(reading(task).file(lines(tmp_path, [{"text": "a", "label": 1}, {"text": "b"}]))[0]["input_ids"]) == 2


@pytest.mark.part(of=16, by=())  # what compares names is given those of either kind of file
@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_names_that_differ_in_case_alone_are_refused_unless_the_document_names_one(
    tmp_path: Path, reading: Callable[..., Read], suffix: str
) -> None:
    def rows(*others: str) -> Path:
        columns: dict[str, list[Any]] = {"text": ONE, "label": [0, 1, 2]}
        columns |= {other: ONE[::-1] if other == "TEXT" else [2, 1, 0] for other in others}
        table = datasets.Dataset.from_dict(columns)
        path = tmp_path / f"rows.{suffix}"
        {"csv": table.to_csv, "jsonl": table.to_json}[suffix](str(path))
        return path

    for other, one in (("Label", "label_key"), ("TEXT", "text_key")):
        first = "label" if one == "label_key" else "text"
        with pytest.raises(
            Refusal, match=f"`{other}`.* differ in case alone|differ in case alone.*`{other}`"
        ) as refused:
            reading().file(rows(other))
        assert refused.value.code == "ambiguous_fields"
        assert f"`{first}`" in refused.value.message
        assert f"`{one}: " in refused.value.message
    assert reading().file(rows("Label"), label_key="label")[1].tolist() == [0, 1, 2]
    assert reading().file(rows("Label"), label_key="Label")[1].tolist() == [2, 1, 0]
    # what is not read may go by any name
    assert reading("masked_lm").file(rows("Label"))[1] is not None
    assert reading().file(rows("Id", "id", "Kind"))[1].tolist() == [0, 1, 2]


BAD = [
    ([{"text": "a", "hypothesis": "b", "label": 0}], "looks like the other half of a pair"),
    ([{"text": "a", "sentence1": "b", "sentence2": "c", "label": 0}], "more than one reading"),
    ([{"premise": "a", "hypothesis": "b", "sentence1": "c", "sentence2": "d", "label": 0}], "more than one reading"),
    ([{"input_ids": [1, 2], "text": "a", "label": 0}], "`input_ids` would be numbers for the model"),
    ([{"premise": "a", "label": 0}], "line 1 is no JSON object with `text`: there is no `text` among `premise`"),
    (
        [{"text": "a", "label": 0}, {"text": "b", "text_pair": "c", "label": 0}],
        "line 2 has `text_pair`, and lines before",
    ),
    ([{"text": "a", "text_pair": "c", "label": 0}, {"text": "b", "label": 0}], "line 2 has no `text_pair`"),
    ([{"text": "a", "text_pair": None, "label": 0}], "`text_pair` must be a string"),
    ([["a", "b"]], "line 1 is no JSON object"),
]


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize(("rows", "said"), BAD, ids=[said[:30] for _, said in BAD])
def test_what_cannot_be_read_as_it_stands_is_refused(
    tmp_path: Path, reading: Callable[..., Read], rows: Any, said: str
) -> None:
    with pytest.raises(Refusal, match=said):
        reading().file(lines(tmp_path, rows))


def test_a_field_that_stands_twice_in_a_line_is_refused(tmp_path: Path, reading: Callable[..., Read]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a", "label": 0, "text": "b"}\n')
    with pytest.raises(Refusal, match="two fields are called `text`"):
        reading().file(path)
    with pytest.raises(Refusal, match="two fields are called `text`"):
        reading().table(path, target_column="label")


def test_pairs_are_refused_where_texts_are_embedded_or_there_is_no_tokenizer(
    tmp_path: Path, reading: Callable[..., Read]
) -> None:
    path = lines(tmp_path, pairs("text", "text_pair"))
    with pytest.raises(Refusal, match="embeds each by itself"):
        reading("sentence_embedding").file(path)
    bare = LoadedModel(model=torch.nn.Linear(3, 2), vocabulary=Vocabulary(size=256, max_length=16, tokenizer=None))
    with pytest.raises(Refusal, match="no tokenizer that could join them"):
        reading("causal_lm", bare).file(path)


def test_texts_that_are_cut_are_counted(tmp_path: Path, minilm: Path, reading: Callable[..., Read]) -> None:
    texts = ["word " * count for count in (1, 5, 600, 509, 511, 700)]
    tokenizer = tokenizer_of(minilm)
    longer = sum(len(tokenizer(text)["input_ids"]) > 512 for text in texts)
    path = lines(tmp_path, [{"text": text} for text in texts])
    read = reading("masked_lm")
    stream = file.load(DataFile(source="file", path=str(path), sequence_length=1000), read.request)
    assert max(inputs["input_ids"].shape[1] for inputs, *_ in stream.batches()) == 512
    said = f"{longer} of 6 texts are longer than 512 tokens and are cut there: the model has no more positions"
    assert read.notices == [said]
    bare = LoadedModel(model=torch.nn.Linear(3, 2), vocabulary=Vocabulary(size=256, max_length=16, tokenizer=None))
    read = reading("causal_lm", bare)
    (tmp_path / "lines.txt").write_text("x" * 16 + "\n" + "y" * 17 + "\nz\n")
    read.file(tmp_path / "lines.txt")
    assert read.notices == [
        "1 of 3 texts have fewer than 2 tokens and are left out",
        "1 of 3 texts are longer than 16 tokens and are cut there: the model has no more positions",
    ]


@pytest.fixture
def copied(tmp_path: Path, minilm: Path) -> Callable[..., Path]:
    """A copy of the encoder's folder with other fields in tokenizer_config.json."""

    def make(**fields: Any) -> Path:
        folder = tmp_path / "copied"
        shutil.copytree(minilm, folder, dirs_exist_ok=True)
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads((minilm / path.name).read_text()) | fields))
        return folder

    return make


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_are_cut_at_the_end_that_transformers_cuts(
    tmp_path: Path, copied: Callable[..., Path], context: LoaderContext, side: str
) -> None:
    folder = copied(truncation_side=side)
    model = load(DirectoryModel(source="directory", path=str(folder)), Task(type="sentence_embedding"), context)
    inputs, *_ = Read(context, model, "sequence_classification").file(
        lines(tmp_path, pairs("premise", "hypothesis")), sequence_length=9
    )
    require_tokens_of(folder, inputs, truncation=True, max_length=9)


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize("field", ["do_lower_case", "strip_accents", "tokenize_chinese_chars"])
def test_a_tokenizer_config_that_contradicts_the_tokenizer_is_refused(
    tmp_path: Path, copied: Callable[..., Path], context: LoaderContext, field: str
) -> None:
    folder = copied(**{field: False})
    model = load(DirectoryModel(source="directory", path=str(folder)), Task(type="sentence_embedding"), context)
    with pytest.raises(Refusal, match=f"tokenizer_config.json says `{field}: False`"):
        Read(context, model, "masked_lm").file(lines(tmp_path, [{"text": "Ä text"}]))


def test_tensors_that_a_model_has_no_argument_for_are_refused(tmp_path: Path, reading: Callable[..., Read]) -> None:
    path = tmp_path / "data.safetensors"
    ids = {"input_ids": torch.ones(4, 5, dtype=torch.int64), "attention_mask": torch.ones(4, 5, dtype=torch.int64)}
    safetensors.torch.save_file(ids | {"targets": torch.arange(4)}, path)
    inputs, _ = reading().file(path)
    assert set(inputs) == set(ids)
    safetensors.torch.save_file(ids | {"weights": torch.ones(4), "targets": torch.arange(4)}, path)
    with pytest.raises(Refusal, match="`weights` are tensors that the model's forward has no argument for"):
        reading().file(path)
    safetensors.torch.save_file(ids | {"labels": torch.arange(4)}, path)
    with pytest.raises(Refusal, match="name them `targets`"):
        reading().file(path)


def test_that_the_english_data_set_is_cut_is_no_notice(reading: Callable[..., Read]) -> None:
    from catalog.requests.inputs import BuiltinData  # noqa: PLC0415 - beside its only use

    read = reading("masked_lm")
    builtin.load(BuiltinData(source="builtin", name="english", limit=8), read.request)
    assert read.notices == []


@pytest.mark.parametrize(("paired", "least", "length"), [(False, 3, 1), (False, 3, 2), (True, 4, 2), (True, 4, 3)])
def test_a_length_that_special_tokens_fill_is_refused(
    tmp_path: Path, reading: Callable[..., Read], paired: bool, least: int, length: int
) -> None:
    rows = pairs("text", "text_pair") if paired else [{"text": text, "label": 0} for text in ONE]
    with pytest.raises(Refusal, match=rf"`sequence_length` must be at least {least} \(got {length}\)"):
        reading().file(lines(tmp_path, rows), sequence_length=length)
    inputs, *_ = reading().file(lines(tmp_path, rows), sequence_length=least)
    assert inputs["input_ids"].shape == (len(ONE), least)
