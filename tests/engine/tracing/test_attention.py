"""Attention whose projections are parameters, not modules: the layers are those of modules fed the same."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from engine.factors.factor_set import FactorSet
from engine.model.state.preserve_state import preserve_state
from tests.oracles import collect, ggn_block, kronecker, relative_error, row_vector, stacked

EXACT = 1e-10


class Attending(nn.Module):
    """Torch's attention between two linear layers; ``input_ids`` are the features, to bring a mask along."""

    def __init__(self, batch_first: bool = True, **options: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.batch_first = batch_first
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=batch_first, **options)  # type: ignore[arg-type]
        nn.init.normal_(self.attention.out_proj.bias)
        self.double()

    def inputs(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return h, h, h

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        inputs = self.inputs(torch.tanh(self.first(input_ids)))
        padded = None if attention_mask is None else attention_mask == 0
        if self.batch_first:
            out, _ = self.attention(*inputs, key_padding_mask=padded)
        else:
            turned = {id(part): part.transpose(0, 1) for part in inputs}
            out, _ = self.attention(*(turned[id(part)] for part in inputs), key_padding_mask=padded)
            out = out.transpose(0, 1)
        return self.head(torch.tanh(out))


class Crossing(Attending):
    """Queries, keys and values of three kinds."""

    def inputs(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return h, torch.sin(h)[..., : self.attention.kdim], torch.cos(h)[..., : self.attention.vdim]


class Spelled(nn.Module):
    """The same attention, each of its projections a linear layer of its own."""

    def __init__(self, other: Attending) -> None:
        super().__init__()
        self.other = [other]
        attention = other.attention
        self.first, self.head = other.first, other.head
        self.q, self.k, self.v = (nn.Linear(width, 4) for width in (4, attention.kdim, attention.vdim))
        self.out = nn.Linear(4, 4)
        self.out.load_state_dict(attention.out_proj.state_dict())
        packed = attention.in_proj_weight
        weights = (
            packed.chunk(3)
            if packed is not None
            else (attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight)
        )
        for layer, weight, bias in zip((self.q, self.k, self.v), weights, attention.in_proj_bias.chunk(3), strict=True):
            layer.weight.data, layer.bias.data = weight.detach().clone(), bias.detach().clone()
        self.double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        inputs = self.other[0].inputs(torch.tanh(self.first(input_ids)))
        q, k, v = (
            layer(part).unflatten(-1, (2, 2)).transpose(1, 2)
            for layer, part in zip((self.q, self.k, self.v), inputs, strict=True)
        )
        mask = None if attention_mask is None else (attention_mask != 0)[:, None, None]
        mixed = functional.scaled_dot_product_attention(q, k, v, mask)
        return self.head(torch.tanh(self.out(mixed.transpose(1, 2).flatten(2))))


def data(masked: bool, examples: int = 6) -> tuple[object, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(examples, 5, 4, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 3, (examples, 5), generator=generator)
    mask = torch.ones(examples, 5, dtype=torch.int64)
    mask[0, 3:] = mask[3, 1:] = 0
    return ({"input_ids": x, "attention_mask": mask}, y.masked_fill(mask == 0, -100)) if masked else (x, y)


def layer(whole: FactorSet, name: str) -> tuple[Tensor, Tensor]:
    (ordinal,) = [facts.ordinal for facts in whole.layers if facts.name == name]
    factors = whole.load(ordinal)
    return factors.A, factors.G


@pytest.mark.part(of=20, by=("sharing",))
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_a_packed_projection_is_three_linear_layers_fed_the_same(batch_first: bool, masked: bool, sharing: str) -> None:
    model = Attending(batch_first)
    options = {"fisher": "mc", "sharing": sharing, "batch_size": 4}
    whole = collect(model, [data(masked)], "masked_lm", min_coverage=1.0, **options)
    truth = collect(Spelled(model), [data(masked)], "masked_lm", min_coverage=1.0, **options)
    a, g = layer(whole, "attention.in_proj_weight")
    assert g.shape == (12, 12)
    for place, name in enumerate("qkv"):
        known_a, known_g = layer(truth, name)
        assert relative_error(a, known_a) < EXACT
        # summed over positions, the gradient of a key is zero but for rounding
        assert (g[4 * place :, 4 * place :][:4, :4] - known_g).norm() < EXACT * g.norm()
    for name, known in (("attention.out_proj", "out"), ("first", "first"), ("head", "head")):
        for found, wanted in zip(layer(whole, name), layer(truth, known), strict=True):
            assert relative_error(found, wanted) < EXACT
    (facts,) = [facts for facts in whole.layers if facts.name == "attention.in_proj_weight"]
    assert facts.parameters == ("attention.in_proj_weight", "attention.in_proj_bias")
    assert facts.positions == (24 if masked else 30)


@pytest.mark.part(of=16, by=("options",))
@pytest.mark.parametrize("options", [{}, {"kdim": 3, "vdim": 2}])
@pytest.mark.parametrize("batch_first", [True, False])
def test_projections_of_different_inputs_are_layers_of_their_own(options: dict[str, int], batch_first: bool) -> None:
    model = Crossing(batch_first, **options)
    whole = collect(model, [data(True)], "masked_lm", fisher="mc", sharing="reduce", min_coverage=1.0)
    truth = collect(Spelled(model), [data(True)], "masked_lm", fisher="mc", sharing="reduce")
    names = (
        [f"attention.{letter}_proj_weight" for letter in "qkv"]
        if options
        else [f"attention.in_proj_weight[{start}:{start + 4}]" for start in (0, 4, 8)]
    )
    for name, known in zip(names, "qkv", strict=True):
        (a, g), (known_a, known_g) = layer(whole, name), layer(truth, known)
        assert relative_error(a, known_a) < EXACT
        # summed over positions, the gradient of a key is zero but for rounding
        assert (g - known_g).norm() < EXACT * layer(truth, "v")[1].norm()


def test_separate_weights_fed_the_same_share_their_activations() -> None:
    class Same(Attending):
        def __init__(self) -> None:
            super().__init__(kdim=4, vdim=4)
            attention = self.attention
            # what torch itself does where the widths differ
            attention._qkv_same_embed_dim = False
            for letter, part in zip("qkv", attention.in_proj_weight.detach().chunk(3), strict=True):
                setattr(attention, f"{letter}_proj_weight", nn.Parameter(part.clone()))
            attention.in_proj_weight = None

    whole, packed = (collect(model, [data(False)], "masked_lm") for model in (Same(), Attending()))
    shared = {facts.name: facts.shared_A_with for facts in whole.layers if facts.name.endswith("proj_weight")}
    first = next(facts.ordinal for facts in whole.layers if facts.name == "attention.q_proj_weight")
    assert list(shared.values()) == [None, first, first]
    _, g = layer(packed, "attention.in_proj_weight")
    for place, name in enumerate(shared):
        found_a, found_g = layer(whole, name)
        assert relative_error(found_a, layer(packed, "attention.in_proj_weight")[0]) < EXACT
        assert relative_error(found_g, g[4 * place :, 4 * place :][:4, :4]) < EXACT


def test_the_block_of_a_packed_projection_is_exact_where_attention_is_linear() -> None:
    """One position attends to itself alone, and a linear net with a square loss has equal gradients everywhere."""

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = x[:, None]
            return self.head(self.attention(x, x, x)[0])[:, 0]

    model = Linear().double()
    x, y = torch.randn(7, 4, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    whole = collect(model, [(x, y)], "regression", min_coverage=1.0)
    for name, weight, bias in (
        ("attention.in_proj_weight", "attention.in_proj_weight", "attention.in_proj_bias"),
        ("attention.out_proj", "attention.out_proj.weight", "attention.out_proj.bias"),
    ):
        truth = ggn_block(model, x, y, "mse", (weight, bias), row_vector(weight, bias))
        assert relative_error(kronecker(whole, name), truth) < EXACT


def test_added_keys_and_values_have_the_diagonal_of_their_block() -> None:
    class Pooled(Attending):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return super().forward(input_ids, attention_mask).mean(1)

    for batch_first in (True, False):
        model = Pooled(batch_first, add_bias_kv=True)
        x, y = data(False)
        assert isinstance(x, Tensor)
        y = y[:, 0]
        whole = collect(model, [(x, y)], "classification", min_coverage=1.0)
        for name in ("attention.bias_k", "attention.bias_v"):
            truth = ggn_block(model, x, y, "cross_entropy", (name,), stacked(name)).diagonal()
            assert relative_error(layer(whole, name)[1], truth) < EXACT


class Encoded(nn.Module):
    """A whole encoder, run again in the backward pass or not."""

    def __init__(self, again: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        block = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(block, 2), nn.Linear(4, 3)
        self.first, self.again = nn.Linear(4, 4), again
        self.double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        def encode(h: Tensor) -> Tensor:
            return self.encoder(h, src_key_padding_mask=attention_mask == 0)

        h = self.first(input_ids)
        return self.head(encode(h) if self.again is None else checkpoint(encode, h, use_reentrant=self.again))


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_checkpointed_encoder_is_covered_alike(again: bool) -> None:
    truth, found = (
        collect(Encoded(how), [data(True)], "masked_lm", fisher="mc", min_coverage=1.0) for how in (None, again)
    )
    assert found.layers == truth.layers
    for facts in truth.layers:
        left, right = found.load(facts.ordinal), truth.load(facts.ordinal)
        assert relative_error(left.A, right.A) < EXACT
        assert relative_error(left.G, right.G) < EXACT


def test_attention_is_computed_as_before_afterwards() -> None:
    assert torch.backends.mha.get_fastpath_enabled()
    model = Encoded()
    with preserve_state(model, torch.float64):
        assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with preserve_state(model, torch.float64):
            pass
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
