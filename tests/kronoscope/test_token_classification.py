"""A label for each token: the curvature is that of ``transformers``' own loss, by autograd of one text at a time."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import BertConfig, BertForTokenClassification, PreTrainedTokenizerFast

from catalog.requests.collection import Collection
from kronoscope.local import Measurement, load_factors, measure

Run = Callable[..., subprocess.CompletedProcess[str]]
LENGTHS = (5, 4, 6, 5, 5, 4)
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "##a", "##b", "Ada", "wrote", "."]


def bert() -> BertForTokenClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, num_labels=5,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )  # fmt: skip
    return BertForTokenClassification(config).double().eval()


def texts(lengths: tuple[int, ...] = LENGTHS) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for length in lengths:
        labels = torch.randint(0, 5, (length,), generator=generator)
        labels[0] = -100
        yield torch.randint(4, 20, (length,), generator=generator), labels


def padded(chosen: list[tuple[Tensor, Tensor]]) -> tuple[dict[str, Tensor], Tensor]:
    width = max(len(ids) for ids, _ in chosen)
    rows = [nn.functional.pad(ids, (0, width - len(ids))) for ids, _ in chosen]
    labels = [nn.functional.pad(own, (0, width - len(own)), value=-100) for _, own in chosen]
    masks = [(torch.arange(width) < len(ids)).long() for ids, _ in chosen]
    inputs = {"input_ids": torch.stack(rows), "attention_mask": torch.stack(masks)}
    # one row for each text: a table that a batch shares is another law's
    inputs["position_ids"] = torch.arange(width).expand(len(chosen), width).contiguous()
    return inputs, torch.stack(labels)


def exact_traces(model: BertForTokenClassification, data: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Σ_n ‖∇ℓ_n‖² of each parameter over all labels that count, ℓ_n the sum that the model's own mean is of."""
    names = [name for name, _ in model.named_parameters()]
    total, terms = dict.fromkeys(names, 0.0), 0
    for ids, labels in data:
        count = int((labels != -100).sum())
        loss = model(input_ids=ids[None], labels=labels[None]).loss * count
        terms += count
        for name, part in zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            total[name] += float(part.square().sum())
    return {name: each / terms for name, each in total.items()}


def require_traces(found: Measurement, exact: dict[str, float], rel: float = 1e-10) -> None:
    rows = found.of("factors")
    for layer in ("classifier", "bert.encoder.layer.0.output.dense", "bert.encoder.layer.0.attention.self.query"):
        truth = exact[f"{layer}.weight"] + exact[f"{layer}.bias"]
        assert rows[layer].metrics.exact_trace == pytest.approx(truth, rel=rel)


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize(
    ("task", "size", "batched"),
    [
        ("token_classification", 1, 6),
        ("token_classification", 2, 1),
        ("token_classification", 4, 6),
        ("classification", 1, 1),
        ("classification", 4, 2),
    ],
)
def test_any_mix_of_lengths_gives_what_one_text_at_a_time_gives(task: str, size: int, batched: int) -> None:
    """Five labels, and texts of five tokens among others: also where the first batch has as many of both."""
    model, data = bert(), list(texts())
    chunks = [padded(data[start : start + batched]) for start in range(0, len(data), batched)]
    found = measure(
        model, chunks, task=task, kinds=("factors",),
        collection=Collection(fisher="empirical", dtype="float64", batch_size=size),
    )  # fmt: skip
    require_traces(found, exact_traces(model, data))


def test_texts_as_long_as_there_are_labels() -> None:
    """All alike, so that no shape tells labels and tokens apart."""
    model, data = bert(), list(texts((5,) * 6))
    for task in ("token_classification", "sequence_classification"):
        found = measure(
            model, [padded(data)], task=task, kinds=("factors",),
            collection=Collection(fisher="empirical", dtype="float64", batch_size=4),
        )  # fmt: skip
        require_traces(found, exact_traces(model, data))


def test_without_labels_padding_is_no_term() -> None:
    model, data = bert(), list(texts())
    inputs, _ = padded(data)
    found = measure(
        model, [(inputs, None)], task="token_classification", kinds=("factors",),
        collection=Collection(fisher="mc", dtype="float64", batch_size=4),
    )  # fmt: skip
    assert found.index["layers"][-1]["terms"] == sum(LENGTHS)


def test_the_models_own_loss_is_the_same() -> None:
    model, data = bert(), list(texts())
    both = [
        measure(
            model, [padded([own]) for own in data], task={"type": "token_classification", "loss": loss},
            kinds=("factors",), collection=Collection(fisher="empirical", dtype="float64", batch_size=1),
        )
        for loss in ("cross_entropy", "model")
    ]  # fmt: skip
    for name, factors in both[0].factors.items():
        torch.testing.assert_close(both[1].factors[name].G, factors.G, rtol=1e-9, atol=1e-12)


def test_a_checkpoint_with_a_file_of_words_and_tags(folder: Path, kronoscope: Run) -> None:
    model = bert()
    model.float().save_pretrained(folder / "tagger")
    made = tokenizers.Tokenizer(models.WordPiece({piece: n for n, piece in enumerate(PIECES)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.save(str(folder / "tagger" / "tokenizer.json"))
    lines = [
        {"words": ["Ada", "wrote", "ab", "."], "tags": [1, 0, 4, 2]},
        {"words": ["bba"], "tags": [3]},
        {"words": ["Ada", "abab", "."], "tags": [1, -100, 2]},
    ]
    (folder / "words.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "tags.yaml").write_text(
        "kind: factors\nkeep: [factors]\nmodel: {source: directory, path: tagger}\n"
        "data: {source: file, path: words.jsonl}\ntask: {type: token_classification}\n"
        "collection: {fisher: empirical, dtype: float64, batch_size: 2}\n"
    )
    done = kronoscope("run", "tags.yaml", "--output", "out")
    assert done.returncode == 0, done.stderr
    fast = PreTrainedTokenizerFast(tokenizer_object=made)
    data = []
    for line in lines:
        encoding = fast(line["words"], is_split_into_words=True)
        words = encoding.word_ids()
        own = [
            line["tags"][word] if word is not None and word not in words[:place] else -100
            for place, word in enumerate(words)
        ]
        data.append((torch.tensor(encoding["input_ids"]), torch.tensor(own)))
    exact = exact_traces(model.double(), data)
    rows = {row["layer"]: row for row in json.loads((folder / "out" / "results.json").read_text())["layers"]}
    for layer in ("classifier", "bert.encoder.layer.0.output.dense"):
        truth = exact[f"{layer}.weight"] + exact[f"{layer}.bias"]
        assert rows[layer]["metrics"]["exact_trace"] == pytest.approx(truth, rel=1e-9)
    assert load_factors(folder / "out")["classifier"].G.shape == (5, 5)
    (folder / "words.jsonl").write_text(json.dumps({"words": ["Ada"], "tags": [5]}))
    beyond: Any = kronoscope("run", "tags.yaml", "--output", "no")
    assert beyond.returncode == 2
    assert "but the model has" in beyond.stderr
