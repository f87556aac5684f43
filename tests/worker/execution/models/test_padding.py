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
from worker.execution.data import file
from worker.execution.data.request import DataRequest
from worker.execution.loader_context import LoaderContext

D = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 60}
KV = D | {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 24}
SEEN = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
        "patch_size": 4}  # fmt: skip
# that of an instruction-tuned checkpoint: two ends, and no padding
ENDS = {"eos_token_id": [1, 7]}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", D),
    "gpt2": ("GPT2Config", {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 60, "n_positions": 24}),
    "llama": ("LlamaConfig", KV | ENDS),
    "qwen2": ("Qwen2Config", KV | ENDS),
    "gemma3": ("Gemma3Config", {"text_config": KV, "vision_config": SEEN, **ENDS}),
    "xlnet": ("XLNetConfig", {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32, "vocab_size": 60}),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_a_text_has_the_same_logits_beside_a_longer_one(
    family: str, saved: Callable[..., Path], tmp_path: Path
) -> None:
    transformers, tokenizers = importlib.import_module("transformers"), importlib.import_module("tokenizers")
    name, fields = CONFIGS[family]
    folder = saved("AutoModelForSequenceClassification", getattr(transformers, name)(**fields))
    words = {f"w{place}": place for place in range(60)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    texts = ["w11 w12 w13", "w21 w22 w23 w24 w25 w26", "w31"]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text, "label": 0}) + "\n" for text in texts))
    context, task = LoaderContext(store=tmp_path / "store"), Task(type="sequence_classification")
    source = importlib.import_module("worker.execution.models.checkpoint")
    loaded = source.load(DirectoryModel(source="directory", path=str(folder)), task, context)
    logits = []
    for batch_size in (1, 3):
        request = DataRequest(task=task, loaded=loaded, batch_size=batch_size, seed=0, context=context)
        batches = file.load(DataFile(source="file", path=str(path)), request).batches()
        with torch.no_grad():
            logits.append(torch.cat([loaded.model(**inputs).logits for inputs, _, _ in batches]))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-6)
    assert (logits[0][0] - logits[0][2]).abs().max() > 1e-4, "the logits say nothing of the text"
