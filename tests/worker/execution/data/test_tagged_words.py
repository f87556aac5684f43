"""Tagged words: each word's tag on its first token, as ``transformers`` counts a text's words."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from catalog.requests.data_sources import DataFile
from catalog.requests.inputs import HuggingFaceData
from worker.execution.data import file, huggingface
from worker.execution.data.stream import DataRequest
from worker.execution.files.open_files import OpenFolder
from worker.execution.loaded_model import LoadedModel, Vocabulary
from worker.execution.refusal import Refusal

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "##a", "##b", "##c", "Ada", "wrote", "."]
LINES = [
    {"words": ["Ada", "wrote", "abc", "."], "tags": [1, 0, 2, 0]},
    {"words": ["bab"], "tags": [2]},
    {"words": ["Ada", "baa", "Ada"], "tags": [1, -100, 1], "id": "17"},
    {"words": ["zzz", "wrote"], "tags": [2, 0]},
]
For = Callable[..., DataRequest]


def wordpiece() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.WordPiece({piece: n for n, piece in enumerate(PIECES)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return made


def byte_level() -> tokenizers.Tokenizer:
    letters = {letter: n for n, letter in enumerate([*"ĠAdabwrotecz.", "Ġa", "ab"])}
    vocabulary = {piece: n for n, piece in enumerate(dict.fromkeys(letters))}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, [("Ġ", "a"), ("a", "b")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


def reader(folder: Path, tokenizer: tokenizers.Tokenizer, most: int = 16) -> LoadedModel:
    tokenizer.save(str(folder / "tokenizer.json"))
    found = OpenFolder.by_itself(folder, "/model").file("tokenizer.json")
    vocabulary = Vocabulary(
        size=64,
        max_length=most,
        tokenizer=found,
        arguments=frozenset({"input_ids", "attention_mask"}),
        explicit_positions=True,
    )
    return LoadedModel(model=torch.nn.Linear(2, 3), vocabulary=vocabulary)


def written(folder: Path, lines: list[dict[str, Any]]) -> str:
    (folder / "data.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return str(folder / "data.jsonl")


def texts(stream: Any) -> list[tuple[list[int], list[int]]]:
    """Ids and targets of each text without its padding, where nothing may be a target."""
    found = []
    for inputs, targets, _ in stream.batches():
        for ids, mask, own in zip(inputs["input_ids"], inputs["attention_mask"], targets, strict=True):
            length = int(mask.sum())
            assert (own[length:] == -100).all()
            found.append((ids[:length].tolist(), own[:length].tolist()))
    return found


@pytest.mark.parametrize("kind", [wordpiece, byte_level])
@pytest.mark.parametrize("size", [1, 3])
def test_the_first_token_of_a_word_has_its_tag(tmp_path: Path, request_for: For, kind: Any, size: int) -> None:
    asked = request_for(reader(tmp_path, kind()), "token_classification", batch_size=size)
    source = DataFile(source="file", path=written(tmp_path, LINES))
    theirs = kind()
    if kind is byte_level:
        # without it transformers refuses words
        theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    fast = PreTrainedTokenizerFast(tokenizer_object=theirs)
    expected = []
    for line in LINES:
        encoding = fast(line["words"], is_split_into_words=True)
        words = encoding.word_ids()
        tags = [
            line["tags"][word] if word is not None and word not in words[:place] else -100
            for place, word in enumerate(words)
        ]
        expected.append((encoding["input_ids"], tags))
    assert texts(file.load(source, asked)) == expected


def test_a_data_set_has_a_list_in_each_row(tmp_path: Path, request_for: For) -> None:
    rows = [{"tokens": line["words"], "ner_tags": line["tags"]} for line in LINES]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    asked = request_for(reader(tmp_path, wordpiece()), "token_classification")
    source = HuggingFaceData(
        source="huggingface", id=str(tmp_path / "train.json"), input_column="tokens", target_column="ner_tags"
    )
    found = texts(huggingface.load(source, asked))
    same = texts(file.load(DataFile(source="file", path=written(tmp_path, LINES)), asked))
    assert found == same
    with pytest.raises(Refusal, match="needs a column of tags"):
        huggingface.load(
            HuggingFaceData(source="huggingface", id=str(tmp_path / "train.json"), input_column="tokens"), asked
        )


def test_texts_that_are_cut_and_fields_that_are_not_read_are_said(tmp_path: Path, request_for: For) -> None:
    asked = request_for(reader(tmp_path, wordpiece(), most=4), "token_classification")
    noted: list[str] = []
    unused: list[str] = []
    context = replace(asked.context, note=noted.append, unused=unused.append)
    found = texts(file.load(DataFile(source="file", path=written(tmp_path, LINES)), replace(asked, context=context)))
    assert [len(ids) for ids, _ in found] == [4, 4, 4, 4]
    assert any("3 of 4 texts are longer than 4 tokens" in each for each in noted)
    assert any("`id` of data.jsonl" in each for each in unused)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"text": "Ada wrote", "label": 1}, r"line 2: `words` must be a list of 1 to 65,536 entries.*\(got none\)"),
        ({"words": "Ada wrote", "tags": [1, 0]}, r"`words` must be a list .*\(got str\)"),
        ({"words": ["Ada"]}, "`tags` must be a list"),
        ({"words": [], "tags": []}, "`words` must be a list of 1"),
        ({"words": ["Ada", "wrote"], "tags": [1]}, "`words` has 2 entries and `tags` 1; give a tag for each word"),
        ({"words": ["Ada", 3], "tags": [1, 0]}, r"`words` must be a string \(got 3\); leave out"),
        (
            {"words": ["Ada"], "tags": ["B-PER"]},
            "`tags` is the text `B-PER` in data.jsonl line 2 and a number in .* 1;",
        ),
        ({"words": ["Ada"], "tags": [["B"]]}, r"`tags` must be a number \(got \['B'\]\)"),
        ({"words": ["Ada"], "tags": [1.5]}, r"whole number, for `token_classification` \(got 1\.5\)"),
        ({"words": ["Ada"], "tags": [True]}, r"must be a number \(got True\); write 0 and 1"),
        ({"words": ["Ada"], "tags": [None]}, r"must be a number \(got None\); .* or write -100, which is not counted"),
        ({"words": ["\ud800"], "tags": [1]}, "`words` holds half of a surrogate pair"),
    ],
)
def test_a_line_that_is_no_tagged_text_is_refused(
    tmp_path: Path, request_for: For, line: dict[str, Any], message: str
) -> None:
    asked = request_for(reader(tmp_path, wordpiece()), "token_classification")
    with pytest.raises(Refusal, match=message):
        file.load(DataFile(source="file", path=written(tmp_path, [LINES[0], line])), asked)


def test_texts_without_a_tag_that_counts_are_refused(tmp_path: Path, request_for: For) -> None:
    asked = request_for(reader(tmp_path, wordpiece()), "token_classification")
    with pytest.raises(Refusal, match="no word of the 1 texts has a tag that counts"):
        file.load(DataFile(source="file", path=written(tmp_path, [{"words": ["Ada"], "tags": [-100]}])), asked)


def test_a_length_that_special_tokens_fill_is_refused(tmp_path: Path, request_for: For) -> None:
    asked = request_for(reader(tmp_path, wordpiece()), "token_classification")
    source = DataFile(source="file", path=written(tmp_path, LINES), sequence_length=2)
    with pytest.raises(Refusal, match=r"`sequence_length` must be at least 3 \(got 2\).*adds 2 special tokens"):
        file.load(source, asked)
