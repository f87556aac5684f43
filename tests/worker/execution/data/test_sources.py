import json
import math
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import safetensors.torch
import torch

from catalog.requests.data_sources import DataFile
from catalog.requests.inputs import (
    BuiltinData,
    DataFactory,
    DirectoryModel,
    HuggingFaceData,
    SyntheticData,
    Task,
)
from worker.execution.data import builtin, factory, file, huggingface, synthetic
from worker.execution.data.stream import DataRequest
from worker.execution.data.validation import validate_chunks
from worker.execution.files import safetensors_header
from worker.execution.files.open_files import OpenFile
from worker.execution.files.safetensors_header import read_header, read_rows
from worker.execution.loaded_model import LoadedModel, Vocabulary
from worker.execution.loader_context import LoaderContext
from worker.execution.models.checkpoint import load
from worker.execution.refusal import Refusal

PLAIN = LoadedModel(model=torch.nn.Linear(3, 2))
BYTES = LoadedModel(model=torch.nn.Linear(3, 2), vocabulary=Vocabulary(size=256, max_length=16, tokenizer=None))
TEXTS = ["the first text", "a second, rather longer text than the first", "third", "and one more to make four of them"]


@pytest.fixture(scope="module")
def encoder(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The real encoder, which no test changes."""
    context = LoaderContext(store=tmp_path_factory.mktemp("store"))
    return load(DirectoryModel(source="directory", path=str(minilm)), Task(type="sentence_embedding"), context)


def write(path: Path, rows: Any) -> Any:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataFile(source="file", path=str(path))


def rows_of(stream: Any) -> Any:
    """Every example by its index, padding cut off."""
    found = {}
    for inputs, targets, index in stream.batches():
        lengths = inputs["attention_mask"].sum(1)
        for row, place in enumerate(index.tolist()):
            cut = slice(0, int(lengths[row]))
            found[place] = (
                inputs["input_ids"][row, cut].tolist(),
                None if targets is None else targets[row, cut].tolist() if targets.ndim == 2 else targets[row].item(),
            )
    return found


def test_texts_are_padded_to_the_longest_of_each_batch(
    tmp_path: Path, encoder: LoadedModel, request_for: Callable[..., DataRequest]
) -> None:
    source = write(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    stream = file.load(source, request_for(encoder, "sentence_embedding", batch_size=2))
    first, second = stream.batches()
    assert first[0]["input_ids"].shape != second[0]["input_ids"].shape
    assert first[0]["attention_mask"].sum(1).max() == first[0]["input_ids"].shape[1]
    assert first[0]["position_ids"].shape == first[0]["input_ids"].shape
    assert first[1] is None
    assert stream.examples == 4


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4])
def test_masking_does_not_depend_on_the_batch_size(
    tmp_path: Path, encoder: LoadedModel, request_for: Callable[..., DataRequest], batch_size: int
) -> None:
    source = write(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    whole = rows_of(file.load(source, request_for(encoder, "masked_lm", batch_size=4)))
    parts = rows_of(file.load(source, request_for(encoder, "masked_lm", batch_size=batch_size)))
    assert parts == whole
    for ids, targets in whole.values():
        masked = [place for place, target in enumerate(targets) if target != -100]
        assert masked
        assert all(ids[place] == 103 for place in masked)  # [MASK]
        assert 0 not in masked  # never [CLS]
        assert len(ids) - 1 not in masked  # never [SEP]


def test_about_fifteen_per_cent_are_masked_and_another_seed_masks_others(
    tmp_path: Path, encoder: LoadedModel, request_for: Callable[..., DataRequest]
) -> None:
    source = write(tmp_path / "texts.jsonl", [{"text": " ".join(["word"] * 100)} for _ in range(40)])
    draws = [rows_of(file.load(source, request_for(encoder, "masked_lm", seed=seed))) for seed in (0, 1)]
    shares = [sum(t != -100 for _, targets in rows.values() for t in targets) / (40 * 100) for rows in draws]
    assert all(abs(share - 0.15) < 4 * math.sqrt(0.15 * 0.85 / 4000) for share in shares)
    assert draws[0] != draws[1]


def test_labels_reach_the_targets(
    tmp_path: Path, encoder: LoadedModel, request_for: Callable[..., DataRequest]
) -> None:
    source = write(tmp_path / "texts.jsonl", [{"text": text, "label": n} for n, text in enumerate(TEXTS)])
    found = rows_of(file.load(source, request_for(encoder, "sequence_classification")))
    assert [found[place][1] for place in range(4)] == [0, 1, 2, 3]
    (batch,) = file.load(source, request_for(encoder, "regression")).batches()
    assert batch[1].dtype == torch.float32


def test_lines_of_text_are_read_as_bytes_by_a_byte_model(
    tmp_path: Path, request_for: Callable[..., DataRequest]
) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("\ufeffhello\n\n  wörld is longer than sixteen bytes\n", encoding="utf-8")
    source = DataFile(source="file", path=str(path))
    ((ids, targets, index),) = file.load(source, request_for(BYTES, "causal_lm")).batches()
    assert bytes(ids[0, :5].tolist()).decode() == "hello"
    assert ids.shape == (2, 16)
    assert targets[0, 5:].tolist() == [-100] * 11
    assert index.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("task", "said", "kept"),
    [
        ("causal_lm", ["warning: 2 of 4 texts have fewer than 2 tokens and are left out"], ["ab", "abc"]),
        ("sentence_embedding", [], ["a", "b", "ab", "abc"]),
    ],
)
def test_a_text_of_one_token_lacks_the_one_to_predict(
    tmp_path: Path, context: LoaderContext, task: str, said: list[str], kept: list[str]
) -> None:
    lines: list[str] = []
    told = replace(context, log=lambda level, message: lines.append(f"{level}: {message}"))
    path = tmp_path / "texts.txt"
    path.write_text("a\nb\nab\nabc\n")
    request = DataRequest(task=Task(type=task), loaded=BYTES, batch_size=4, seed=0, context=told)  # type: ignore[arg-type]
    chunks = list(file.load(DataFile(source="file", path=str(path)), request).batches())
    inputs = [chunk[0]["input_ids"] if isinstance(chunk[0], dict) else chunk[0] for chunk in chunks]
    assert sum(len(each) for each in inputs) == len(kept)
    assert lines == said


def test_tensors_of_a_file_pass_as_they_are(tmp_path: Path, request_for: Callable[..., DataRequest]) -> None:
    path = tmp_path / "data.safetensors"
    tensors = {"inputs": torch.randn(5, 3), "targets": torch.arange(5)}
    safetensors.torch.save_file(tensors, path)
    stream = file.load(DataFile(source="file", path=str(path), limit=4), request_for(PLAIN, "classification"))
    ((inputs, targets),) = stream.batches()
    assert torch.equal(inputs, tensors["inputs"][:4])
    assert targets.tolist() == [0, 1, 2, 3]
    assert stream.examples == 4


def test_rows_are_those_that_the_library_reads(tmp_path: Path) -> None:
    """In every type, and in chunks."""
    bits = torch.randint(0, 2, (5, 2, 64), dtype=torch.uint8)
    tensors = {name: bits.clone().view(getattr(torch, name)) for name in safetensors_header._DTYPES.values()}
    path = tmp_path / "data.safetensors"
    safetensors.torch.save_file(tensors, path)
    opened = OpenFile(path.name, os.open(path, os.O_RDONLY))
    with safetensors.safe_open(path, framework="pt") as library:
        for name, entry in read_header(opened, "/data/path").items():
            for start, stop in ((0, 5), (1, 3), (4, 5)):
                rows, truth = read_rows(opened, entry, start, stop, "/data/path"), library.get_slice(name)[start:stop]
                assert rows.dtype == truth.dtype
                assert torch.equal(rows.view(torch.uint8), truth.contiguous().view(torch.uint8)), name
    last = max(read_header(opened, "/data/path").values(), key=lambda entry: entry.begin)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(Refusal, match="became shorter"):
        read_rows(opened, last, 0, 5, "/data/path")


def test_a_file_beyond_all_memory_is_read_by_its_rows(tmp_path: Path, request_for: Callable[..., DataRequest]) -> None:
    """56 GB on paper; a mapping of the whole is what a job may have no room for."""
    path, rows = tmp_path / "data.safetensors", 10**9
    header = {
        "inputs": {"dtype": "F32", "shape": [rows, 12], "data_offsets": [0, 48 * rows]},
        "targets": {"dtype": "I64", "shape": [rows], "data_offsets": [48 * rows, 56 * rows]},
    }
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    os.truncate(path, 8 + len(raw) + 56 * rows)
    room = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**30, room[1]))
    try:
        stream = file.load(DataFile(source="file", path=str(path)), request_for(PLAIN, "classification"))
        inputs, targets = next(iter(stream.batches()))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, room)
    assert stream.examples == rows
    assert len(inputs) == len(targets)
    assert not inputs.any()


BAD_FILES = [
    ("no-lines.jsonl", b"", "no text"),
    ("blank.txt", b"\n \n", "no text"),
    ("not-json.jsonl", b"{nope}\n", "line 1 is no JSON object"),
    ("no-text.jsonl", b'{"label": 1}\n', "line 1 is no JSON object with `text`"),
    ("number.jsonl", b'{"text": 3}\n', "`text` must be a string"),
    ("table.CSV", b"", "cannot be read as csv"),
    ("half.jsonl", b'{"text": "a"}\n{"text": "\\ud800"}\n', "line 2: `text` holds half of a surrogate pair"),
    ("halves.jsonl", b'{"text": "\\udc00\\ud800"}\n', "line 1: `text` holds half of a surrogate pair"),
    ("binary.txt", b"\xff\xfe\x00", "not UTF-8"),
    ("long.txt", b"x" * 2_000_000, "longer than"),
    ("table.feather", b"", "`.feather` is not read"),
    ("table.parquet", b"", "cannot be read as parquet"),
    ("table.csv", b"", "cannot be read as csv"),
    ("pickle.safetensors", b"\x80\x04" + b"x" * 100, "pickle"),
]


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize(
    ("name", "content", "said"), BAD_FILES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_bad_file_names_the_line_and_the_field(
    tmp_path: Path, encoder: LoadedModel, request_for: Callable[..., DataRequest], name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Refusal, match=said) as refused:
        file.load(DataFile(source="file", path=str(tmp_path / name)), request_for(encoder, "sentence_embedding"))
    assert refused.value.pointer == "/data/path"


BAD_LABELS = [
    ("ragged.jsonl", b'{"text": "a", "label": 1}\n{"text": "b"}\n', "1 of 2 lines have a `label`"),
    ("later.jsonl", b'{"text": "a", "target": 3}\n{"text": "b", "label": 0, "target": 7}\n', "name the labels"),
    ("flag.jsonl", b'{"text": "a", "label": true}\n', "`label` must be a number"),
]


@pytest.mark.parametrize(("name", "content", "said"), BAD_LABELS, ids=[name for name, *_ in BAD_LABELS])
def test_labels_that_do_not_fit_are_refused_where_the_task_uses_them(
    tmp_path: Path, encoder: LoadedModel, request_for: Callable[..., DataRequest], name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    source = DataFile(source="file", path=str(tmp_path / name))
    with pytest.raises(Refusal, match=said) as refused:
        file.load(source, request_for(encoder, "sequence_classification"))
    assert refused.value.pointer == "/data/path"
    assert file.load(source, request_for(encoder, "sentence_embedding")).labels is None


LABELS = [
    ("1e308", "sequence_classification", "must be a class index"),
    ("1e308", "regression", "must lie within"),
    ("1e999", "sequence_classification", "must be a finite number"),
    ("1e999", "regression", "must be a finite number"),
    ("-1e999", "regression", "must be a finite number"),
    ("NaN", "sequence_classification", "must be a finite number"),
    ("NaN", "regression", "must be a finite number"),
    ("1.7", "sequence_classification", r"must be a class index.*got 1\.7"),
    ("1e19", "sequence_classification", "must be a class index"),
    ("9223372036854775808", "sequence_classification", "must be a class index"),
    ("1" + "0" * 400, "sequence_classification", "must be a class index"),
    ("1" + "0" * 400, "regression", "must lie within"),
    ("1" + "0" * 5000, "regression", "no JSON object"),
    ('"1"', "regression", "must be a number"),
    ("[1]", "regression", "must be a number"),
    ("null", "regression", "must be a number"),
]


@pytest.mark.parametrize(("label", "task", "said"), LABELS, ids=lambda value: str(value)[:20])
def test_a_label_that_cannot_be_is_refused_with_its_line(
    tmp_path: Path, request_for: Callable[..., DataRequest], label: str, task: str, said: str
) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(f'{{"text": "a", "label": 1}}\n{{"text": "b", "label": {label}}}\n')
    with pytest.raises(Refusal, match=rf"texts\.jsonl line 2.*{said}") as refused:
        file.load(DataFile(source="file", path=str(path)), request_for(BYTES, task))
    assert (refused.value.category, refused.value.pointer) == ("usage", "/data/path")


@pytest.mark.parametrize("label", [1.7, math.inf, math.nan, 1e308])
def test_a_label_of_a_data_set_that_is_no_class_is_refused_with_its_row(
    tmp_path: Path, request_for: Callable[..., DataRequest], label: float
) -> None:
    datasets.Dataset.from_dict({"text": ["a", "b"], "mark": [0.0, label]}).to_parquet(str(tmp_path / "a.parquet"))
    source = HuggingFaceData(source="huggingface", id=str(tmp_path), target_column="mark")
    with pytest.raises(Refusal, match="row 1: `mark` must be a "):
        huggingface.load(source, request_for(BYTES, "sequence_classification"))


def test_a_class_written_as_a_fraction_of_nothing_is_that_class(
    tmp_path: Path, request_for: Callable[..., DataRequest]
) -> None:
    source = write(tmp_path / "texts.jsonl", [{"text": "a", "label": 1.0}, {"text": "b", "label": 0}])
    ((_, targets, _),) = file.load(source, request_for(BYTES, "sequence_classification")).batches()
    assert targets.dtype == torch.int64
    assert targets.tolist() == [1, 0]


def test_tensors_that_disagree_on_the_examples_are_refused(
    tmp_path: Path, request_for: Callable[..., DataRequest]
) -> None:
    path = tmp_path / "data.safetensors"
    safetensors.torch.save_file({"inputs": torch.zeros(5, 3), "targets": torch.zeros(4)}, path)
    with pytest.raises(Refusal, match=r"`inputs` \[5, 3\]; `targets` \[4\]"):
        file.load(DataFile(source="file", path=str(path)), request_for(PLAIN, "regression"))
    safetensors.torch.save_file({"inputs": torch.zeros(0, 3), "targets": torch.zeros(0)}, path)
    with pytest.raises(Refusal, match="no example"):
        file.load(DataFile(source="file", path=str(path)), request_for(PLAIN, "regression"))
    safetensors.torch.save_file({"inputs": torch.zeros(2**40, 0), "targets": torch.zeros(2**40, 0, 1)}, path)
    with pytest.raises(Refusal, match=r"`inputs` of shape \[1099511627776, 0\] holds no numbers"):
        file.load(DataFile(source="file", path=str(path)), request_for(PLAIN, "regression"))


def test_a_missing_label_says_which_task_needs_it(
    tmp_path: Path, encoder: LoadedModel, request_for: Callable[..., DataRequest]
) -> None:
    source = write(tmp_path / "texts.jsonl", [{"text": "a"}])
    with pytest.raises(Refusal, match="needs a label for every text"):
        file.load(source, request_for(encoder, "sequence_classification"))


def test_texts_for_a_model_of_images_are_refused(tmp_path: Path, request_for: Callable[..., DataRequest]) -> None:
    source = write(tmp_path / "texts.jsonl", [{"text": "a"}])
    with pytest.raises(Refusal, match="reads no tokens"):
        file.load(source, request_for(PLAIN, "classification"))
    with pytest.raises(Refusal, match="reads tokens"):
        builtin.load(BuiltinData(source="builtin", name="digits"), request_for(BYTES, "classification"))


def test_english_of_a_model_with_a_tokenizer_is_its_own_tokens(
    encoder: LoadedModel, request_for: Callable[..., DataRequest]
) -> None:
    data = BuiltinData(source="builtin", name="english", limit=3)
    stream = builtin.load(data, request_for(encoder, "sentence_embedding"))
    ((inputs, _, _),) = stream.batches()
    assert inputs["input_ids"][:, 0].tolist() == [101] * 3  # [CLS]


def test_synthetic_data_is_the_same_on_every_pass(request_for: Callable[..., DataRequest]) -> None:
    source = SyntheticData(source="synthetic", shape=(3,), examples=10, classes=2, seed=7)
    stream = synthetic.load(source, request_for(PLAIN, "classification"))
    ((first, classes),), ((again, _),) = stream.batches(), stream.batches()
    assert torch.equal(first, again)
    assert first.shape == (10, 3)
    assert set(classes.tolist()) <= {0, 1}
    # torch's generator of the host reads the lowest 32 bits of a seed alone
    far = synthetic.load(replace(source, seed=7 + 2**32), request_for(PLAIN, "classification"))
    ((other, _),) = far.batches()
    assert not torch.equal(first, other)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "csv"])
def test_a_local_data_set_is_read_without_the_hub(
    tmp_path: Path, encoder: LoadedModel, request_for: Callable[..., DataRequest], suffix: str
) -> None:
    table = datasets.Dataset.from_dict({"sentence": TEXTS, "mark": [0, 1, 0, 1]})
    path = tmp_path / f"train.{suffix}"
    {"parquet": table.to_parquet, "jsonl": table.to_json, "csv": table.to_csv}[suffix](str(path))
    source = HuggingFaceData(
        source="huggingface", id=str(tmp_path), input_column="sentence", target_column="mark", limit=3
    )
    found = rows_of(huggingface.load(source, request_for(encoder, "sequence_classification")))
    assert [found[place][1] for place in range(3)] == [0, 1, 0]
    with pytest.raises(Refusal, match="`text` is not a column; there are `sentence`, `mark`"):
        huggingface.load(HuggingFaceData(source="huggingface", id=str(tmp_path)), request_for(encoder, "masked_lm"))


def chunks(*given: Any, loaded: LoadedModel = PLAIN) -> Any:
    from worker.execution.data.stream import DataStream  # noqa: PLC0415 - beside its only use

    return list(validate_chunks(DataStream(batches=lambda: iter(given), examples=None), loaded, "/data").batches())


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_inputs_that_are_not_finite_are_named_by_example(dtype: torch.dtype) -> None:
    bad = torch.zeros(4, 3, dtype=dtype)
    bad[2, 1] = math.nan
    with pytest.raises(Refusal, match="inputs of example 6 hold NaN or Inf"):
        chunks((torch.zeros(4, 3), torch.zeros(4)), (bad, torch.zeros(4)))


def test_token_ids_beyond_the_vocabulary_are_named() -> None:
    with pytest.raises(Refusal, match="example 1 holds token id 300; the model has 0 to 255"):
        chunks((torch.tensor([[1], [300]]), None), loaded=BYTES)
    with pytest.raises(Refusal, match="17 tokens; the model has 16 positions"):
        chunks((torch.zeros(1, 17, dtype=torch.int64), None), loaded=BYTES)
    with pytest.raises(Refusal, match="reads token ids"):
        chunks((torch.zeros(1, 4), None), loaded=BYTES)


def test_a_data_factory_is_called_anew_for_every_pass(
    tmp_path: Path, context: LoaderContext, request_for: Callable[..., DataRequest], import_path: None
) -> None:
    (tmp_path / "kronoscope_test_calls.py").write_text(
        "import torch\ncalls = []\ndef make(n):\n    calls.append(n)\n    yield torch.zeros(n, 3), torch.zeros(n)\n"
    )
    request = request_for(PLAIN, "regression")
    object.__setattr__(request.context, "paths", (tmp_path,))
    source = DataFactory(source="factory", factory="kronoscope_test_calls:make", kwargs={"n": 2})
    stream = factory.load(source, request)
    assert len(list(stream.batches())) == len(list(stream.batches())) == 1
    assert __import__("kronoscope_test_calls").calls == [2, 2]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return 3", "returned int; it must return an iterable"),
        ("raise ValueError('no such split')", "raised ValueError: no such split"),
        ("yield torch.zeros(2)", "yields Tensor"),
        ("yield (torch.zeros(2),)", "yields tuple of 1"),
        ("yield torch.zeros(2, 3), None\n    raise OSError('disk gone')", "raised OSError: disk gone"),
    ],
)
def test_a_data_factory_that_misbehaves_is_told_what_it_did(
    tmp_path: Path, request_for: Callable[..., DataRequest], import_path: None, body: str, said: str
) -> None:
    name = f"kronoscope_test_data_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(f"import torch\ndef make():\n    {body}\n")
    request = request_for(PLAIN, "regression")
    object.__setattr__(request.context, "paths", (tmp_path,))
    stream = factory.load(DataFactory(source="factory", factory=f"{name}:make"), request)
    with pytest.raises(Refusal, match=said):
        list(validate_chunks(stream, PLAIN, "/data").batches())
