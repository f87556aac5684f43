"""Experts in one parameter: each slice is a linear layer that sees only the tokens routed to it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import MixtralConfig, MixtralForCausalLM

from engine.collect import collect_or_read
from engine.factors.factor_set import FactorSet
from engine.memory.plan import Chosen
from tests.oracles import MemoryArtifacts, collect, ggn_block, kronecker, relative_error, row_vector, workspace

EXACT = 1e-10
EXPERTS = 4

Mixture = Callable[["Fused", Tensor, Tensor], Tensor]


class Fused(nn.Module):
    """Tokens (N, T, d) go each to the expert that its id names; the last expert gets none."""

    def __init__(self, mixture: Mixture, activation: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.up = nn.Parameter(torch.randn(EXPERTS, 8, 4))
        self.shift = nn.Parameter(torch.randn(EXPERTS, 8))
        self.down = nn.Parameter(torch.randn(EXPERTS, 8, 4))
        self.mixture, self.activation = mixture, activation
        self.double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        del attention_mask
        routes = (input_ids[..., 0].abs() * 100).long() % (EXPERTS - 1)
        return self.head(self.activation(self.mixture(self, self.activation(self.first(input_ids)), routes)))


def looped(model: Fused, x: Tensor, routes: Tensor) -> Tensor:
    tokens, flat = x.reshape(-1, 4), routes.flatten()
    out = torch.zeros(tokens.shape[0], 4, dtype=x.dtype)
    for expert in flat.unique():
        (token,) = torch.where(flat == expert)
        h = model.activation(functional.linear(tokens[token], model.up[expert], model.shift[expert]))
        out.index_add_(0, token, h @ model.down[expert])
    return out.view_as(x)


def masked(model: Fused, x: Tensor, routes: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for expert in range(EXPERTS - 1):
        chosen = routes == expert
        h = model.activation(functional.linear(x[chosen], model.up[expert], model.shift[expert]))
        out = out.masked_scatter(chosen[..., None], torch.einsum("td,do->to", h, model.down[expert]))
    return out


def grouped(model: Fused, x: Tensor, routes: Tensor) -> Tensor:
    order = routes.flatten().argsort(stable=True)
    stops = torch.bincount(routes.flatten(), minlength=EXPERTS).cumsum(0).to(torch.int32)
    tokens = x.flatten(0, 1).index_select(0, order)
    h = model.activation(torch._grouped_mm(tokens, model.up.transpose(1, 2), offs=stops))
    out = torch._grouped_mm(h, model.down, offs=stops)
    return torch.zeros_like(out).index_copy(0, order, out).view_as(x)


def taken(model: Fused, x: Tensor, routes: Tensor) -> Tensor:
    """Tokens brought into the order of their experts, as far as provenance goes by an unknown operation."""
    order = routes.flatten().argsort(stable=True)
    tokens = x.flatten(0, 1).take(order[:, None] * 4 + torch.arange(4))
    out, start = [], 0
    for expert in range(EXPERTS - 1):
        stop = start + int((routes == expert).sum())
        h = model.activation(functional.linear(tokens[start:stop], model.up[expert], model.shift[expert]))
        out.append(h @ model.down[expert])
        start = stop
    return torch.zeros_like(tokens).index_copy(0, order, torch.cat(out)).view_as(x)


def scattered(model: Fused, x: Tensor, routes: Tensor) -> Tensor:
    """The same, the tokens put there in place."""
    order = routes.flatten().argsort(stable=True)
    tokens = torch.zeros_like(x.flatten(0, 1))
    tokens[order.argsort()] = x.flatten(0, 1)
    return taken(model, tokens.view_as(x), routes.flatten()[order].view_as(routes))


def data(examples: int = 6, length: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(examples, length, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (examples, length), generator=generator)


def named(whole: FactorSet) -> dict[str, int]:
    return {facts.name: facts.ordinal for facts in whole.layers}


def require_same(found: FactorSet, truth: FactorSet, names: dict[str, str], within: float = EXACT) -> None:
    for name, known in names.items():
        left, right = found.load(named(found)[name]), truth.load(named(truth)[known])
        assert relative_error(left.A, right.A) < within, name
        assert relative_error(left.G, right.G) < within, name


class Apart(nn.Module):
    """The same mixture of linear modules, which all see every token, those of others as padding."""

    def __init__(self, fused: Fused, expert: int) -> None:
        super().__init__()
        self.fused = [fused]
        self.expert = expert
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4, bias=False)
        self.up.weight.data, self.up.bias.data = fused.up.detach()[expert].clone(), fused.shift.detach()[expert].clone()
        self.down.weight.data = fused.down.detach()[expert].T.clone()

    def forward(self, x: Tensor) -> Tensor:
        model = self.fused[0]
        routes = (x[..., 0].abs() * 100).long() % (EXPERTS - 1)
        h = model.activation(model.first(x))
        with torch.no_grad():
            rest = looped(model, h, routes)
        # one example at a time, so that the chosen tokens are all of it
        own = h[0, routes[0] == self.expert][None]
        out = rest.clone()
        out[0, routes[0] == self.expert] = self.down(model.activation(self.up(own)))[0]
        return model.head(model.activation(out))


@pytest.mark.part(of=32, by=("mixture",))
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("mixture", [looped, masked])
def test_a_slice_is_a_linear_layer_that_sees_only_its_tokens(mixture: Mixture, sharing: str) -> None:
    model = Fused(mixture)
    x, y = data()
    whole = collect(model, [(x, y)], "masked_lm", fisher="mc", sharing=sharing)
    routes = (x[..., 0].abs() * 100).long() % (EXPERTS - 1)
    for expert in range(EXPERTS - 1):
        alone = collect(Apart(model, expert), [(x, y)], "masked_lm", fisher="mc", sharing=sharing, batch_size=1)
        require_same(whole, alone, {f"up[{expert}]": "up", f"down[{expert}]": "down"})
        for name in (f"up[{expert}]", f"down[{expert}]"):
            facts = whole.layers[named(whole)[name]]
            assert (facts.positions, facts.terms) == (int((routes == expert).sum()), 42)
    assert [(row.name, row.reason, row.parameter_count) for row in whole.declared] == [
        ("up[3]", "never_routed", 40),
        ("down[3]", "never_routed", 32),
    ]


@pytest.mark.parametrize("mixture", [taken, scattered])
def test_tokens_whose_examples_are_not_known_are_declared(mixture: Mixture) -> None:
    # the second gives a token what the place of another one routes it to: its examples mix, which the check would say
    whole = collect(Fused(mixture), [data()], "masked_lm", fisher="mc", sharing="reduce", self_check="off")
    assert {row.reason for row in whole.declared} == {"unknown_operation"}
    assert sum(row.parameter_count for row in whole.declared) == EXPERTS * (8 * 4 + 8 + 8 * 4)


def test_what_experts_leave_lies_where_it_was_picked() -> None:
    """A second mixture on the first one's results, which were added up in place."""

    class Deep(Fused):
        def __init__(self, mixture: Mixture) -> None:
            super().__init__(mixture)
            self.further = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
            self.plain = nn.Linear(4, 4, bias=False).double()
            self.plain.weight.data = self.further.detach().T.clone()
            self.functional = True

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            routes = (input_ids[..., 0].abs() * 100).long() % (EXPERTS - 1)
            h = self.mixture(self, torch.tanh(self.first(input_ids)), routes)
            return self.head(torch.tanh(h @ self.further if self.functional else self.plain(h)))

    model = Deep(looped)
    found = collect(model, [data()], "masked_lm", fisher="mc", sharing="reduce")
    model.functional = False
    truth = collect(model, [data()], "masked_lm", fisher="mc", sharing="reduce")
    require_same(found, truth, {"further": "plain", "up[0]": "up[0]", "down[1]": "down[1]"})


def test_the_block_of_an_expert_is_exact_in_a_linear_net() -> None:
    """A's count and G's are not the same: G is of the mean over all loss terms."""
    model = Fused(looped, activation=lambda x: x)
    x, y = data()
    whole = collect(model, [(x, y.to(torch.float64)[..., None].expand(-1, -1, 3).clone())], "regression")
    for expert in range(EXPERTS - 1):

        def of_expert(jacobian: dict[str, Tensor], expert: int = expert) -> Tensor:
            own = {"w": jacobian["up"][:, expert], "b": jacobian["shift"][:, expert]}
            return row_vector("w", "b")(own)

        def of_output(jacobian: dict[str, Tensor], expert: int = expert) -> Tensor:
            return jacobian["down"][:, expert].transpose(1, 2).flatten(1)

        target = y.to(torch.float64)[..., None].expand(-1, -1, 3)
        truth = ggn_block(model, x, target, "mse", ("up", "shift"), of_expert)
        assert relative_error(kronecker(whole, f"up[{expert}]"), truth) < EXACT
        truth = ggn_block(model, x, target, "mse", ("down",), of_output)
        assert relative_error(kronecker(whole, f"down[{expert}]"), truth) < EXACT


def without_shift(mixture: Mixture) -> Fused:
    model = Fused(mixture)
    model.shift.data.zero_()
    model.shift.requires_grad_(False)
    return model


def test_sorted_tokens_in_one_product_are_the_same_experts() -> None:
    x, y = data()
    # torch's own kernel knows no float64
    options = {"fisher": "mc", "dtype": "float32"}
    found, truth = (collect(without_shift(how), [(x, y)], "masked_lm", **options) for how in (grouped, looped))
    names = [f"{side}[{expert}]" for side in ("up", "down") for expert in range(EXPERTS - 1)]
    require_same(found, truth, {name: name for name in names}, within=1e-5)


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("product", [
    torch.bmm, torch.matmul, lambda x, w: torch.baddbmm(torch.zeros_like(x[:, :, :3]), x, w),
])  # fmt: skip
def test_a_batch_of_matrices_is_several_layers(product: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.experts = nn.Linear(4, 4), nn.Parameter(torch.randn(EXPERTS, 4, 3))
            self.lone = nn.ParameterList([nn.Parameter(part.clone()) for part in self.experts.detach()])

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x)).flatten(0, 1).repeat(EXPERTS, 1).view(EXPERTS, -1, 4)
            together = product(h, self.experts).sin().sum(0).view(*x.shape[:2], 3)
            apart = sum((h[place] @ part).sin() for place, part in enumerate(self.lone)).view_as(together)
            return together + apart

    x, y = data()
    for sharing in ("expand", "reduce"):
        whole = collect(Dense().double(), [(x, y)], "masked_lm", sharing=sharing, min_coverage=1.0)
        require_same(whole, whole, {f"experts[{place}]": f"lone.{place}" for place in range(EXPERTS)})


@pytest.mark.part(of=24, by=("sharing",))
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("mixture", [looped, masked, grouped])
def test_padding_is_routed_nowhere(mixture: Mixture, sharing: str) -> None:
    model = without_shift(mixture)
    lengths = [3, 7, 5]
    x, y = data(3)
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    together = [({"input_ids": x, "attention_mask": mask.long()}, y.masked_fill(~mask, -100))]
    one_by_one = [
        ({"input_ids": x[n : n + 1, :length], "attention_mask": mask[n : n + 1, :length].long()}, y[n : n + 1, :length])
        for n, length in enumerate(lengths)
    ]
    dtype = "float32" if mixture is grouped else "float64"
    joined, apart = (
        collect(model, chunks, "masked_lm", fisher="type2", sharing=sharing, dtype=dtype)
        for chunks in (together, one_by_one)
    )
    assert [(facts.name, facts.positions) for facts in joined.layers] == [
        (facts.name, facts.positions) for facts in apart.layers
    ]
    names = {facts.name: facts.name for facts in joined.layers}
    require_same(joined, apart, names, within=1e-5 if mixture is grouped else EXACT)


def mixtral(**options: object) -> MixtralForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 11, "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "max_position_embeddings": 16,
    }  # fmt: skip
    return MixtralForCausalLM(MixtralConfig(**sizes | {"tie_word_embeddings": False} | options)).double()


def sentences() -> list[tuple[dict[str, Tensor], Tensor]]:
    ids = torch.randint(0, 11, (9, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[2, 4:] = 0
    return [({"input_ids": ids, "attention_mask": mask}, ids)]


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_mixtral_is_covered_whatever_computes_its_experts(implementation: str) -> None:
    model = mixtral()
    model.set_experts_implementation(implementation)
    whole = collect(model, sentences(), "causal_lm", fisher="mc", min_coverage=1.0)
    assert model.config._experts_implementation == implementation
    names = [name for name in named(whole) if "experts" in name]
    assert names == [
        f"model.layers.{block}.mlp.experts.{side}[{expert}]"
        for block in range(2)
        for side in ("gate_up_proj", "down_proj")
        for expert in range(EXPERTS)
    ]
    truth = collect(mixtral(), sentences(), "causal_lm", fisher="mc")
    require_same(whole, truth, {name: name for name in named(whole)})
    for block in range(2):
        routed = [facts.positions for facts in whole.layers if f"layers.{block}.mlp.experts.gate_up_proj" in facts.name]
        # every token goes to two
        assert sum(routed) == 2 * (9 * 6 - 2)


def test_several_passes_and_smaller_slices_change_nothing() -> None:
    truth = collect(mixtral(), sentences(), "causal_lm", fisher="mc", batch_size=9)
    names = list(named(truth))
    space = workspace(mixtral(), sentences(), "causal_lm", fisher="mc", batch_size=9)
    space.resume.chosen = Chosen(parts=(tuple(names[:11]), tuple(names[11:20]), tuple(names[20:])), micro_batch=4)
    space.ports.scratch = MemoryArtifacts()
    found = collect_or_read(space)
    assert found.passes == 3
    require_same(found, truth, {name: name for name in names})


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_the_exact_trace_and_the_corrected_eigenvalues_of_every_slice_agree(sharing: str) -> None:
    """Rotations keep lengths: ``Σ λ`` of a slice is the second moment of its own gradients, token by token."""
    space = workspace(
        mixtral(num_hidden_layers=1), sentences(), "causal_lm", fisher="empirical", sharing=sharing, ekfac=True,
        exact_trace=True,
    )  # fmt: skip
    whole = collect_or_read(space)
    assert whole.load_corrected is not None
    for facts in whole.layers:
        values = whole.load_corrected(facts.ordinal).eigenvalues
        assert facts.exact_trace is not None
        assert abs(float(values.sum()) - facts.exact_trace) < EXACT * facts.exact_trace
    # and the gradients are those of autograd
    model = mixtral(num_hidden_layers=1)
    model.set_experts_implementation("eager")
    (inputs, ids) = sentences()[0]
    total, terms = torch.zeros(EXPERTS, dtype=torch.float64), 0
    weight = model.model.layers[0].mlp.experts.gate_up_proj
    for row in range(9):
        length = int(inputs["attention_mask"][row].sum())
        outputs = model(input_ids=ids[row : row + 1, :length]).logits[0, :-1]
        loss = functional.cross_entropy(outputs, ids[row, 1:length], reduction="sum")
        total += torch.autograd.grad(loss, weight)[0].square().sum((1, 2))
        terms += length - 1
    for expert in range(EXPERTS):
        facts = whole.layers[named(whole)[f"model.layers.0.mlp.experts.gate_up_proj[{expert}]"]]
        assert facts.exact_trace is not None
        assert abs(facts.exact_trace - float(total[expert]) / terms) < 1e-8 * float(total[expert]) / terms
