"""Files beside tokenizer.json: texts have the ids of transformers' own tokenizer of the folder, or are refused."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from catalog.requests.uploads import is_read
from worker.execution.data.texts.tokenizer_process import TokenizerProcess, tokenizer_settings
from worker.execution.files.open_files import OpenFolder
from worker.execution.loaded_model import Vocabulary
from worker.execution.loader_context import LoaderContext
from worker.execution.models.folder_files import TOKENIZER_FILES
from worker.execution.models.hub_snapshot import FILES
from worker.execution.models.tokenizer_config import read_tokenizer_config
from worker.execution.refusal import Refusal

TEXTS = ["the cat sat on the mat", "A dög ran to the park", "hello <s> world again", "5 zebras"]
FLAGS = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
MASK = {"content": "<mask>", **FLAGS, "lstrip": True}


def tokenizer_of(kind: str, **parts: Any) -> Any:
    """A tokenizer as the class of a model type makes one, trained on the texts, with other parts if they are given."""
    library = importlib.import_module("tokenizers")
    if kind == "bert":
        made = library.Tokenizer(library.models.WordPiece(unk_token="[UNK]"))
        made.normalizer = library.normalizers.BertNormalizer(**parts)
        made.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        made.train_from_iterator(TEXTS[:3], library.trainers.WordPieceTrainer(vocab_size=90, special_tokens=special))
        made.post_processor = library.processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        # as files of sentence encoders have it, which says nothing of the frame
        made.enable_padding(length=64)
        made.enable_truncation(64)
        return made
    made = library.Tokenizer(library.models.BPE())
    if kind == "llama":
        made.pre_tokenizer = library.pre_tokenizers.Metaspace(**({"prepend_scheme": "first", "split": False} | parts))
    else:
        made.pre_tokenizer = library.pre_tokenizers.ByteLevel(**({"add_prefix_space": False} | parts))
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS[:3], library.trainers.BpeTrainer(vocab_size=330, special_tokens=special, initial_alphabet=alphabet)
    )
    if kind == "roberta":
        made.post_processor = library.processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return made


def ids_of(folder: Path, texts: list[Any]) -> list[list[int]]:
    """Read the folder as a job does."""
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    opened = OpenFolder.by_itself(folder, "/model/path")
    config = read_tokenizer_config(opened, model_type, None, LoaderContext(store=folder / "store"))
    vocabulary = Vocabulary(
        size=400, max_length=None, tokenizer=opened.file("tokenizer.json"), tokenizer_claims=config.claims
    )
    settings = tokenizer_settings(vocabulary, 64, ())
    assert vocabulary.tokenizer is not None
    with TokenizerProcess.start(vocabulary.tokenizer, settings, 1000, lambda: None, "/data") as tokenizer:
        if isinstance(texts[0], list):
            return [found.ids for found in tokenizer.encode_words(texts, 0)]
        return [found.ids for found in tokenizer.encode(texts, 0)]


def make_folder(folder: Path, kind: str, parts: dict[str, Any], files: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer_of(kind, **parts).save(str(folder / "tokenizer.json"))
    for name, value in ({"config.json": {"model_type": kind}} | files).items():
        (folder / name).write_text(json.dumps(value))
    return folder


def config(**fields: Any) -> dict[str, Any]:
    return {"tokenizer_config.json": fields}


NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
OPEN = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED}
MORE = {"added_tokens.json": {"cat": 330}}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str | None]] = {
    "gpt2": ("gpt2", {}, config(**NAMED), None),
    "gpt2, a space": ("gpt2", {}, config(**NAMED, add_prefix_space=True), "says `add_prefix_space: True`"),
    "gpt2, both a space": ("gpt2", {"add_prefix_space": True}, config(**NAMED, add_prefix_space=True), None),
    "gpt2, a space in the file alone": (
        "gpt2", {"add_prefix_space": True}, config(**NAMED),
        "`GPT2Tokenizer` has `add_prefix_space: False` where tokenizer_config.json does not say otherwise",
    ),
    "gpt2, no other file": ("gpt2", {"add_prefix_space": True}, {}, "`GPT2Tokenizer` has `add_prefix_space: False`"),
    "roberta, a space": ("roberta", {}, config(add_prefix_space=True), "says `add_prefix_space: True`"),
    "roberta, another start": ("roberta", {}, config(cls_token="</s>"), "its `cls_token` is '</s>' beside .* '<s>'"),
    "bert": ("bert", {}, {}, None),
    "bert, accents with the case": ("bert", {"strip_accents": True}, {}, None),
    "bert, cased": ("bert", {"lowercase": False}, config(do_lower_case=False), None),
    "bert, cased unsaid": ("bert", {"lowercase": False}, {}, "`BertTokenizer` has `do_lower_case: True` where"),
    "bert, another start": ("bert", {}, config(cls_token="[SEP]"), r"its `cls_token` is '\[SEP\]' beside"),
    "bert, another end": (
        "bert", {}, {"special_tokens_map.json": {"sep_token": {"content": "[CLS]", **FLAGS}}}, "its `sep_token` is"
    ),
    "bert, another unknown": ("bert", {}, config(unk_token="[MASK]"), r"its `unk_token` is '\[MASK\]'"),
    "bert, of the general class": (
        "bert", {}, config(tokenizer_class="PreTrainedTokenizerFast", cls_token="[SEP]"), None
    ),
    "llama": ("llama", {}, config(**NAMED, tokenizer_class="LlamaTokenizer", legacy=False), None),
    "llama, no space": (
        "llama", {}, config(**NAMED, tokenizer_class="LlamaTokenizer", legacy=False, add_prefix_space=False),
        "says `add_prefix_space: False`, and .* True",
    ),
    "split": ("gpt2", {}, config(**OPEN, split_special_tokens=True), None),
    "listed twice": (
        "gpt2", {}, config(**OPEN, added_tokens_decoder={"0": {"content": "<s>", **FLAGS}}), None
    ),
    "more tokens": (
        "gpt2", {}, config(**OPEN, added_tokens_decoder={"331": {"content": "cat", **FLAGS}}),
        "text 0: it holds 'cat', and `added_tokens_decoder` of tokenizer_config.json has this as a token",
    ),
    "more tokens, of old": ("gpt2", {}, config(**OPEN) | MORE, "added_tokens.json has this"),
    "more tokens, of old beside new": ("gpt2", {}, config(**OPEN, added_tokens_decoder={}) | MORE, None),
    "more special tokens": ("gpt2", {}, config(**OPEN, extra_special_tokens=["world"]), "text 2: it holds 'world'"),
    "more special tokens by name": (
        "gpt2", {}, config(**OPEN, extra_special_tokens={"image_token": "world"}), "text 2: it holds 'world'"
    ),
    "a token by its name": ("gpt2", {}, config(**OPEN, image_token="world"), "`image_token` of tokenizer_config.json"),
    "more special tokens of old": (
        "gpt2", {}, config(**OPEN) | {"special_tokens_map.json": {"additional_special_tokens": ["dog", "cat"]}},
        "`additional_special_tokens` of special_tokens_map.json",
    ),
    "tokens that no text holds": (
        "gpt2", {}, config(**OPEN, pad_token="[PAD]", extra_special_tokens=["<image>"]), None
    ),
}  # fmt: skip


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize("case", CASES)
def test_texts_have_the_ids_of_transformers_or_are_refused(case: str, tmp_path: Path) -> None:
    kind, parts, files, said = CASES[case]
    folder = make_folder(tmp_path / "model", kind, parts, files)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    expected = [reference(text, padding=False)["input_ids"] for text in TEXTS]
    if said is None:
        assert ids_of(folder, TEXTS) == expected
        return
    bare = tokenizer_of(kind, **parts)
    bare.no_padding()
    assert [each.ids for each in bare.encode_batch(TEXTS)] != expected, (
        "tokenizer.json alone gives the same ids, so a refusal is not deserved"
    )
    with pytest.raises(Refusal, match=said) as refused:
        ids_of(folder, TEXTS)
    assert refused.value.code == "broken_tokenizer"
    # the remedy
    reference.save_pretrained(tmp_path / "again")
    (tmp_path / "again" / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert ids_of(tmp_path / "again", TEXTS) == expected


def test_a_token_with_other_flags_or_another_number_is_refused_where_a_text_holds_it(tmp_path: Path) -> None:
    for number, value, said in [(4, MASK, "`lstrip: True`, unlike"), (9, MASK | FLAGS, "as token 9, and .* as 4")]:
        folder = make_folder(tmp_path / "model", "gpt2", {}, config(**OPEN, added_tokens_decoder={str(number): value}))
        assert ids_of(folder, TEXTS) == [each.ids for each in tokenizer_of("gpt2").encode_batch(TEXTS)]
        with pytest.raises(Refusal, match=rf"text 1: it holds '<mask>', and .*{said}"):
            ids_of(folder, [TEXTS[0], "a <mask>"])


def test_words_and_both_halves_of_a_pair_are_looked_at(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", "bert", {}, config(extra_special_tokens=["ran"]))
    for texts in ([["the", "dog"], ["a", "RAN"]], ["the dog", ("the dog", "RAN")]):
        with pytest.raises(Refusal, match="text 1: it holds 'ran', and `extra_special_tokens`"):
            ids_of(folder, texts)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"])
@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1, "a": 2}'])
def test_a_file_that_cannot_be_read_is_refused_by_name(name: str, content: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", "gpt2", {}, {})
    (folder / name).write_text(content)
    with pytest.raises(Refusal, match=f"^{name} is not .*, so it is not known how texts are tokenised"):
        ids_of(folder, TEXTS)


def test_the_files_beside_a_tokenizer_are_fetched_and_uploaded() -> None:
    """Else the same folder would have other numbers by another way."""
    assert all(is_read("model", name) for name in TOKENIZER_FILES)
    assert set(TOKENIZER_FILES) <= set(FILES)
