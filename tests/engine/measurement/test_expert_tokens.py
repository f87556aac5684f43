"""Tokens of experts: counted as the model's own router counts them when it is run by itself."""

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

from catalog.record import plain
from catalog.responses.coverage import assess_coverage
from engine.factors.factor_set import FactorSet
from engine.measurement.representation_record import expert_tokens
from kronoscope.display.coverage import coverage_lines
from kronoscope.local import measure
from tests.oracles import collect

EXPERTS = 8
SIZES = {
    "vocab_size": 23, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_experts_per_tok": 2, "max_position_embeddings": 16, "output_router_logits": False,
}  # fmt: skip


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, intermediate_size=10, num_local_experts=EXPERTS)).double()


def qwen() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"intermediate_size": 10, "moe_intermediate_size": 10, "shared_expert_intermediate_size": 10}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**SIZES, **sizes, num_experts=EXPERTS)).double()


def sentences() -> tuple[dict[str, Tensor], Tensor]:
    ids = torch.randint(0, 23, (6, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[2, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask}, ids


def routed_by_itself(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """(layers, experts): picks of each router among tokens that are no padding, from its logits alone."""
    model.set_experts_implementation("eager")  # the fused kernels know no float64
    with torch.no_grad():
        logits = model.eval()(**inputs, output_router_logits=True).router_logits
    kept = inputs["attention_mask"].flatten().bool()
    picks = [each.view(-1, EXPERTS)[kept].topk(2).indices.flatten() for each in logits]
    return torch.stack([torch.bincount(each, minlength=EXPERTS) for each in picks])


def positions(whole: FactorSet, name: str) -> int:
    """Positions of a layer; 0 where it is declared as one that no token reached."""
    found = [facts.positions for facts in whole.layers if facts.name == name]
    idle = [row for row in whole.declared if row.name == name and row.reason in ("never_routed", "no_gradient")]
    assert len(found) + len(idle) == 1, name
    return found[0] if found else 0


@pytest.mark.parametrize("make", [mixtral, qwen])
def test_a_fused_expert_counts_the_tokens_that_its_router_picks_it_for(make: Callable[[], nn.Module]) -> None:
    inputs, ids = sentences()
    counts = routed_by_itself(make(), inputs)
    whole = collect(make(), [(inputs, ids)], "causal_lm", fisher="mc")
    found = [
        [
            [positions(whole, f"model.layers.{at}.mlp.experts.{side}[{expert}]") for expert in range(EXPERTS)]
            for at in range(2)
        ]
        for side in ("gate_up_proj", "down_proj")
    ]
    assert found == [counts.tolist(), counts.tolist()]
    tokens = expert_tokens(whole)
    assert tokens is not None
    flat = [*counts.flatten().tolist()] * 2
    assert (tokens.layers, tokens.fewest, tokens.most) == (4 * EXPERTS, min(flat), max(flat))
    # a gate_up has 12 columns in A and 20 in G, a down has 10 and 12
    named = {f"model.layers.{at}.mlp.experts.": counts[at].tolist() for at in range(2)}
    times = {
        f"{prefix}{side}[{expert}]": columns / count
        for prefix, own in named.items()
        for expert, count in enumerate(own)
        for side, columns in (("gate_up_proj", 20), ("down_proj", 12))
        if 0 < count < columns
    }
    assert len(times) > 8, "the draw starves too few for this test"
    assert tokens.starved == len(times)
    assert {each.layer: each.times_more for each in tokens.most_starved}.items() <= times.items()
    assert [each.times_more for each in tokens.most_starved] == sorted(times.values(), reverse=True)[:8]
    for each in tokens.most_starved:
        factors = whole.load(next(facts.ordinal for facts in whole.layers if facts.name == each.layer))
        factor = {"A": factors.A, "G": factors.G}[each.factor]
        assert (each.rank_bound, each.columns) == (min(each.tokens, factor.shape[0]), factor.shape[0])
        assert torch.linalg.matrix_rank(factors.A, hermitian=True) == min(each.tokens, factors.A.shape[0])
        assert torch.linalg.matrix_rank(factor, hermitian=True) <= each.rank_bound < each.columns


class Listed(nn.Module):
    """Experts in a list of modules; the router picks two of them for each token, and never the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.gate, self.head = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(8, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8, bias=False)) for _ in range(4)
        )
        self.gate.bias.data[3] = -100
        self.double()

    def picks(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        weights, places = self.gate(rows).softmax(-1).topk(2, -1)
        return weights, places

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x).flatten(0, 1)
        weights, places = self.picks(rows)
        out = torch.zeros_like(rows)
        for expert, module in enumerate(self.experts):
            token, pick = torch.where(places == expert)
            if len(token):
                out.index_add_(0, token, module(rows[token]) * weights[token, pick, None])
        return self.head(out.view(*x.shape[:2], -1))


def listed_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 3, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (3, 3), generator=generator)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_an_expert_in_a_list_counts_alike_and_one_without_tokens_is_named(sharing: str) -> None:
    model, (x, y) = Listed(), listed_data()
    with torch.no_grad():
        picks = model.picks(model.first(x).flatten(0, 1))[1]
    counts = torch.bincount(picks.flatten(), minlength=4).tolist()
    assert counts[3] == 0
    whole = collect(model, [(x, y)], "masked_lm", fisher="mc", sharing=sharing)
    assert [positions(whole, f"experts.{expert}.{part}") for part in (0, 2) for expert in range(4)] == counts * 2
    tokens = expert_tokens(whole)
    assert tokens is not None
    assert (tokens.layers, tokens.fewest, tokens.most) == (8, 0, max(counts))
    assert (tokens.unreached, tokens.unreached_layers) == (2, ("experts.3.0", "experts.3.2"))
    rows = {f"experts.{at}.{part}": (counts[at], counts[at]) for at in range(3) for part in (0, 2)}
    if sharing == "reduce":  # one row of each example that has a token in A, and one of every example in G
        reached = [(picks.view(3, -1) == expert).any(1).sum().item() for expert in range(3)]
        rows = {name: (int(reached[int(name.split(".")[1])]), 3) for name in rows}
    columns = {"0": (9, 6), "2": (6, 8)}
    times = {name: max(columns[name[-1]][0] / into, columns[name[-1]][1] / out) for name, (into, out) in rows.items()}
    starved = {name: more for name, more in times.items() if more > 1}
    assert {each.layer: each.times_more for each in tokens.most_starved} == starved


def test_the_result_says_it_in_its_summary_records_and_on_a_terminal() -> None:
    x, y = (each.float() if each.is_floating_point() else each for each in listed_data())
    found = measure(Listed().float(), [(x, y)], task="masked_lm")
    tokens = found.summary["capacity"].coverage.experts
    coverage = assess_coverage(json.loads(json.dumps(plain(found.summary))), None)
    assert coverage is not None
    assert tokens == coverage.experts
    records = {row.layer: row.record for row in found.layers if row.record is not None}
    for each in tokens.most_starved:
        record = records[each.layer]
        assert record.positions == each.tokens
        assert record.rank_bound_A == min(each.tokens, record.in_dim)
        assert record.rank_bound_G == min(each.tokens, record.out_dim)
        assert each.rank_bound == (record.rank_bound_A if each.factor == "A" else record.rank_bound_G)
    lines = coverage_lines(coverage)
    worst = tokens.most_starved[0]
    assert lines[0].startswith(f"experts: 8 layers were sent 0 to {tokens.most} tokens each; {tokens.starved} of them")
    assert "  no token reached: experts.3.0, experts.3.2" in lines
    rank = f"rank of {worst.factor} at most {worst.rank_bound} of {worst.columns}"
    assert any(f"  {worst.layer}: T = {worst.tokens}, {rank}; needs " in line for line in lines)


class Plain(nn.Module):
    """Layers in a list that is no list of experts, of which the second sees fewer positions, and a scale unused."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(2, 2)])
        self.heads = nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x) @ self.heads[0] @ self.heads[1]
        out: Tensor = self.layers[1](h.mean(1))
        return out


def test_layers_that_no_router_chooses_between_are_no_experts() -> None:
    whole = collect(Plain(), [(torch.randn(3, 5, 4), torch.arange(3))], "classification")
    assert "heads[1]" in {facts.name for facts in whole.layers}
    assert expert_tokens(whole) is None
