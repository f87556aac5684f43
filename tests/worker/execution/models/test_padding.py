"""Padding: a text has the same logits alone and beside a longer one, wherever the head looks for its end."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from catalog.requests.data_sources import DataFile
from catalog.requests.inputs import DirectoryModel, Task
from engine.workspace import ModelInputs
from jobs.codec import parse_document
from worker.execution.data import file
from worker.execution.data.stream import DataRequest
from worker.execution.job_inputs import enter_data
from worker.execution.loader_context import LoaderContext
from worker.execution.refusal import Refusal

D = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 60}
KV = D | {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 24}
SEEN = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
        "patch_size": 4}  # fmt: skip
# that of an instruction-tuned checkpoint: two ends, and no padding
ENDS = {"eos_token_id": [1, 7]}
LONG = {"rope_type": "longrope", "factor": 6.0, "short_factor": [1, 1.5, 2, 3], "long_factor": [2, 3, 4, 5],
        "original_max_position_embeddings": 4}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", D),
    # reads no mask
    "fnet": ("FNetConfig", {key: each for key, each in D.items() if key != "num_attention_heads"}),
    "gpt2": ("GPT2Config", {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 60, "n_positions": 24}),
    "llama": ("LlamaConfig", KV | ENDS),
    # takes other frequencies for a batch with a text of more than 4 tokens
    "longrope": ("LlamaConfig", KV | ENDS | {"rope_scaling": LONG}),
    "qwen2": ("Qwen2Config", KV | ENDS),
    "gemma3": ("Gemma3Config", {"text_config": KV, "vision_config": SEEN, **ENDS}),
    "xlnet": ("XLNetConfig", {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32, "vocab_size": 60}),
}


TEXTS = ["w11 w12 w13", "w21 w22 w23 w24 w25 w26", "w31"]


def read(
    folder: Path, texts: list[str], end: str | None = None, task: Any = "sequence_classification"
) -> tuple[Any, Callable[[int], torch.Tensor]]:
    """Load a classifier beside a tokenizer of words, and return it with its logits of the texts by the batch size."""
    tokenizers = importlib.import_module("tokenizers")
    words = {f"w{place}": place for place in range(60)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if end is not None:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"$A {end}", special_tokens=[(end, words[end])]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    path = folder.parent / "texts.jsonl"
    rows: list[dict[str, Any]] = [{"text": text, "label": 0} for text in texts]
    if task == "token_classification":
        rows = [{"words": text.split(), "tags": [0 for _ in text.split()]} for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    context, task = LoaderContext(store=folder.parent / "store"), Task(type=task)
    source = importlib.import_module("worker.execution.models.checkpoint")
    loaded = source.load(DirectoryModel(source="directory", path=str(folder)), task, context)

    def logits(batch_size: int) -> torch.Tensor:
        request = DataRequest(task=task, loaded=loaded, batch_size=batch_size, seed=0, context=context)
        batches = file.load(DataFile(source="file", path=str(path)), request).batches()
        with torch.no_grad():
            found = [loaded.model(**inputs).logits for inputs, _, _ in batches]
        return torch.cat([each.flatten(0, -2) for each in found])

    return loaded, logits


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("family", CONFIGS)
def test_a_text_has_the_same_logits_beside_a_longer_one(family: str, saved: Callable[..., Path]) -> None:
    transformers = importlib.import_module("transformers")
    name, fields = CONFIGS[family]
    folder = saved("AutoModelForSequenceClassification", getattr(transformers, name)(**fields))
    _, logits = read(folder, TEXTS)
    alone, beside = logits(1), logits(3)
    torch.testing.assert_close(alone, beside, rtol=1e-5, atol=1e-6)
    assert (alone[0] - alone[2]).abs().max() > 1e-4, "the logits say nothing of the text"


@pytest.mark.parametrize(
    ("family", "ends", "end"),
    [("llama", {"eos_token_id": 2}, "w2"), ("gpt2", {}, "w0"), ("gemma3", {"eos_token_id": [2, 7]}, "w2")],
)
def test_a_text_that_ends_with_what_would_pad_is_read_to_its_end(
    family: str, ends: dict[str, Any], end: str, saved: Callable[..., Path]
) -> None:
    """Logits of a checkpoint that names no padding, by transformers itself with each text alone."""
    transformers = importlib.import_module("transformers")
    name, fields = CONFIGS[family]
    config = getattr(transformers, name)(**{key: each for key, each in fields.items() if "eos" not in key} | ends)
    folder = saved("AutoModelForSequenceClassification", config)
    stored = json.loads((folder / "config.json").read_text())
    for each in (stored, stored.get("text_config", {})):
        # that of gemma3 has one by its class
        each["pad_token_id"] = None
    (folder / "config.json").write_text(json.dumps(stored))
    reference = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert reference.config.get_text_config().pad_token_id is None
    loaded, logits = read(folder, [*TEXTS, f"w31 {end}", "w41 w1"], end)
    ids = [[*(int(word[1:]) for word in text.split()), int(end[1:])] for text in (*TEXTS, f"w31 {end}", "w41 w1")]
    with torch.no_grad():
        expected = torch.cat([reference(input_ids=torch.tensor([each])).logits for each in ids])
    for batch_size in (1, 2, 5):
        torch.testing.assert_close(logits(batch_size), expected, rtol=1e-5, atol=1e-6)
    assert loaded.model.config.get_text_config().pad_token_id == (0 if end == "w2" else 1)


def test_a_vocabulary_of_which_each_token_ends_a_text_has_no_padding(saved: Callable[..., Path]) -> None:
    transformers = importlib.import_module("transformers")
    name, fields = CONFIGS["llama"]
    folder = saved("AutoModelForSequenceClassification", getattr(transformers, name)(**fields))
    _, logits = read(folder, [f"w{place}" for place in range(60)])
    with pytest.raises(Refusal, match="`pad_token_id`, and each of the 60 tokens ends a text") as refused:
        logits(1)
    assert refused.value.code == "no_padding"


@pytest.mark.parametrize(
    ("query", "labels", "said"),
    [
        ("w31 w0", (0, 1), "a query ends with token 0, which pads the data"),
        ("w31", ("neg", "pos"), "`label` of the query holds names"),
        ("w31", (0, 1), None),
    ],
)
def test_a_query_leaves_padding_and_classes_of_the_data(
    query: str, labels: tuple[Any, Any], said: str | None, saved: Callable[..., Path]
) -> None:
    transformers = importlib.import_module("transformers")
    name, fields = CONFIGS["gpt2"]
    folder = saved("AutoModelForSequenceClassification", getattr(transformers, name)(**fields))
    loaded, _ = read(folder, TEXTS)
    files = {"data": [*zip(TEXTS, (*labels, labels[0]), strict=True)], "query": [(query, labels[1])]}
    for each, rows in files.items():
        lines = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows)
        (folder.parent / f"{each}.jsonl").write_text(lines)
    sources = {each: {"source": "file", "path": str(folder.parent / f"{each}.jsonl")} for each in files}
    document = {
        "kind": "influence",
        "model": {"source": "directory", "path": str(folder)},
        "data": sources["data"],
        "task": {"type": "sequence_classification"},
        "influence": {"query": sources["query"]},
    }
    reading: dict[str, Any] = {}
    context = LoaderContext(store=folder.parent / "store", describe=reading.__setitem__)
    inputs = ModelInputs()
    if said is None:
        enter_data(parse_document(json.dumps(document).encode()), loaded, context, inputs)
        assert inputs.query is not None
        assert inputs.query.examples == 1
        return
    with pytest.raises(Refusal, match=said):
        enter_data(parse_document(json.dumps(document).encode()), loaded, context, inputs)
    assert reading.get("labels", {}).get("names", 2) == 2


@pytest.mark.parametrize("family", ["fnet", "longrope"])
def test_tagged_words_have_the_logits_of_each_text_alone(family: str, saved: Callable[..., Path]) -> None:
    """Those of transformers itself, for models that treat a batch by its longest text."""
    transformers = importlib.import_module("transformers")
    name, fields = CONFIGS[family]
    folder = saved("AutoModelForTokenClassification", getattr(transformers, name)(**fields))
    reference = transformers.AutoModelForTokenClassification.from_pretrained(folder).eval()
    texts = ["w11 w12", "w13 w14", "w21 w22 w23 w24 w25", "w31"]
    _, logits = read(folder, texts, task="token_classification")
    with torch.no_grad():
        expected = [reference(input_ids=torch.tensor([[int(word[1:]) for word in each.split()]])).logits[0]
                    for each in texts]  # fmt: skip
    for batch_size in (1, 4):
        torch.testing.assert_close(logits(batch_size), torch.cat(expected), rtol=1e-5, atol=1e-6)
