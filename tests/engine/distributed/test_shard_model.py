"""Units that are found in a model: blocks and tables, none of which shares a parameter with what is outside of it."""

import pytest
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from engine.distributed.sharded_tensors import find_blocks
from tests.engine.distributed.sharded_llama import llama


def bert() -> nn.Module:
    """Its head multiplies by the table's weight."""
    return BertForMaskedLM(
        BertConfig(vocab_size=30, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    )


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (llama, ["model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"]),
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), ["0", "2"]),
        (lambda: nn.Linear(3, 4), []),
        (lambda: nn.ModuleDict({"a": nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)])])}), []),
    ],
)
def test_blocks_and_tables_are_units(make: object, expected: list[str]) -> None:
    assert find_blocks(make()) == expected  # type: ignore[operator]


def test_no_unit_shares_a_parameter_with_what_is_outside_of_it() -> None:
    model = bert()
    units = find_blocks(model)
    assert [name for name in units if "layer." in name] == ["bert.encoder.layer.0", "bert.encoder.layer.1"]
    assert "bert.embeddings.word_embeddings" not in units
    assert "bert.embeddings.position_embeddings" in units
    inside = [id(each) for name in units for each in model.get_submodule(name).parameters()]
    assert len(inside) == len(set(inside))
