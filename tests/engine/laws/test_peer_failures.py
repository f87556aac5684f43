"""Ten ways in which measuring curvature goes wrong elsewhere, each seen when run; none of them happens here."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from catalog.analyses.capacity import CapacityParams
from engine.analyses.capacity import Capacity
from engine.collect import collect_or_read
from engine.errors import BudgetExceeded, CoverageTooLow, NonFiniteFactor, NonFiniteLoss, NotConverged
from engine.factors.factor_set import FactorSet
from engine.factors.kronecker_factors import digest
from engine.linalg import eigensolvers
from engine.memory.budget import MemoryBudget
from engine.memory.plan import LIBRARY_BYTES
from engine.planning import job_plan
from tests.oracles import MemoryArtifacts, collect, ggn_block, kronecker, relative_error, row_vector, workspace

EXACT = 1e-10


def trace(whole: FactorSet, name: str) -> float:
    return float(kronecker(whole, name).diagonal().sum())


def tokens(examples: int = 4, length: int = 7, vocabulary: int = 40) -> Tensor:
    return torch.randint(0, vocabulary, (examples, length), generator=torch.Generator().manual_seed(1))


def gpt2(vocabulary: int = 40) -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocabulary, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    return MixtralForCausalLM(config)


class Positions(nn.Module):
    """A layer with a loss term at every position: K-FAC is the Gauss-Newton matrix there."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).flatten(2).transpose(1, 2)


# 1


@pytest.mark.parametrize("build", [gpt2, mixtral])
def test_no_layer_is_skipped_silently(build: Any, record_property: Any) -> None:
    """Elsewhere the blocks of a GPT-2 vanish (its Conv1D is nobody's Linear), or the fused experts of a mixture
    do, and the result is of a third of the model or less, without a word. Here every parameter is covered or declared
    by name, once, and of these models every one is covered.
    """
    model = build()
    ids = tokens()
    whole = collect(model, [({"input_ids": ids}, None)], "causal_lm", fisher="mc", dtype="float32")
    named = [name for layer in (*whole.layers, *whole.declared) for name in layer.parameters]
    trainable = sum(parameter.numel() for parameter in model.parameters())
    declared = sum(layer.parameter_count for layer in whole.declared)
    record_property("covered_share", whole.covered_parameters / trainable)
    assert whole.covered_parameters + declared == whole.trainable_parameters == trainable
    assert {name for name, _ in model.named_parameters()} <= {name.partition("[")[0] for name in named}
    assert whole.covered_parameters == trainable


def test_too_small_a_share_fails_before_anything_is_computed() -> None:
    """And who needs the whole model can say so, and learns it before the first batch."""
    model = nn.Sequential(nn.Embedding(5, 4, max_norm=1.0), nn.Flatten(), nn.Linear(16, 3))
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(CoverageTooLow):
        collect(model.double(), [(torch.zeros(3, 4).long(), torch.zeros(3).long())], "classification", min_coverage=0.9)
    assert calls == []


# 2


def test_attention_modules_are_measured() -> None:
    """Elsewhere `nn.MultiheadAttention` ends in a KeyError and `nn.TransformerEncoderLayer` in a NotImplementedError,
    or the packed projection is left out. Its three projections are linear layers, and are measured as these are.
    """

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(x).mean(1))

    model = Encoder().double()
    x, y = torch.randn(6, 5, 8, dtype=torch.float64), torch.randint(0, 3, (6,))
    whole = collect(model, [(x, y)], "classification", fisher="mc")
    assert whole.declared == ()
    assert whole.covered_parameters == sum(parameter.numel() for parameter in model.parameters())


# 3


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize(
    "options",
    [
        {"groups": 2},
        {"groups": 4},
        {"dilation": 2},
        {"padding": 1, "padding_mode": "reflect"},
        {"padding": 1, "padding_mode": "circular", "stride": 2, "groups": 2},
    ],
)
def test_convolutions_of_every_kind_are_the_convolutions_they_are(options: dict[str, Any]) -> None:
    """Elsewhere groups, dilation and padding modes are taken and ignored: 31 to 86 % off without a word."""
    torch.manual_seed(0)
    model = Positions(nn.Conv2d(4, 4, 3, **options))
    x = torch.randn(3, 4, 6, 6, dtype=torch.float64)
    y = torch.randn_like(model(x)).detach()
    whole = collect(model, [(x, y)], "regression")
    names = ("layer.weight", "layer.bias")
    exact = ggn_block(model, x, y, "mse", names, row_vector(*names))
    # groups stand one after the other in the weight, hence in the block, which is zero between them
    found = torch.block_diag(*(kronecker(whole, layer.name) for layer in whole.layers))
    assert whole.declared == ()
    assert relative_error(found, exact) < EXACT


# 4


def test_a_module_used_twice_and_a_tied_weight_count_every_use() -> None:
    """Elsewhere the last call wins, or tied weights count once: 1.5 off in norm, a third of the trace."""

    class Twice(nn.Module):
        def __init__(self, second: nn.Linear | None = None) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(4, 4)
            self.again = self.inner if second is None else second

        def forward(self, x: Tensor) -> Tensor:
            return self.again(torch.tanh(self.inner(x)))

    tied = nn.Linear(4, 4)
    shared, linked = Twice().double(), Twice(tied).double()
    linked.again.weight, linked.again.bias = linked.inner.weight, linked.inner.bias
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    hidden = torch.tanh(shared.inner(x)).detach()
    rows = torch.cat([torch.cat([x, hidden]), torch.ones(12, 1, dtype=torch.float64)], 1)
    slope = (1 - hidden.square())[:, :, None] * shared.inner.weight.detach().T
    upstream = torch.einsum("nij,nkj->ik", slope, slope) / 6
    eye = torch.eye(4, dtype=torch.float64)
    for model in (shared, linked):
        whole = collect(model, [(x, y)], "regression")
        (layer,) = whole.layers
        factors = whole.load(0)
        assert (layer.calls, layer.positions) == (2, 12)
        assert relative_error(factors.A, rows.T @ rows / 12) < EXACT
        assert relative_error(factors.G, 2 / 4 * (upstream + eye)) < EXACT


# 5


def test_padding_and_ignored_targets_are_no_data() -> None:
    """Elsewhere padded positions enter A and ignored targets are counted as terms: a norm of 25.1 for 18.8."""
    model = gpt2().double()
    ids = tokens(3)
    lengths = (7, 4, 6)
    mask = (torch.arange(7)[None] < torch.tensor(lengths)[:, None]).long()
    padded = ids.where(mask.bool(), torch.tensor(39))
    for fisher in ("empirical", "mc"):
        apart = collect(
            model,
            [
                ({"input_ids": row[None, :size], "attention_mask": torch.ones(1, size).long()}, row[None, :size])
                for row, size in zip(ids, lengths, strict=True)
            ],
            "causal_lm",
            fisher=fisher,
        )
        inputs = {"input_ids": padded, "attention_mask": mask}
        together = collect(model, [(inputs, padded.where(mask.bool(), torch.tensor(-100)))], "causal_lm", fisher=fisher)
        for layer in together.layers:
            left, right = together.load(layer.ordinal), apart.load(layer.ordinal)
            assert layer.terms == sum(lengths) - 3
            assert relative_error(left.A, right.A) < EXACT, layer.name
            assert relative_error(left.G, right.G) < EXACT, layer.name


# 6


@pytest.mark.part(of=32, by=("sharing",))
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("fisher", ["type2", "mc", "empirical"])
def test_a_linear_layer_and_a_convolution_of_one_have_the_same_trace(fisher: str, sharing: str) -> None:
    """Elsewhere the two differ by exactly the number of positions."""
    torch.manual_seed(0)
    linear = nn.Linear(3, 4)
    convolution = nn.Conv1d(3, 4, 1)
    convolution.weight.data, convolution.bias.data = linear.weight.data[:, :, None], linear.bias.data

    class Along(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    x, y = torch.randn(4, 5, 3, dtype=torch.float64), torch.randint(0, 4, (4, 5))
    along = collect(Along().double(), [(x, y)], "classification", fisher=fisher, sharing=sharing)
    across = collect(Positions(convolution), [(x.transpose(1, 2), y)], "classification", fisher=fisher, sharing=sharing)
    assert math.isclose(trace(along, "layer"), trace(across, "layer"), rel_tol=EXACT)
    assert relative_error(kronecker(along, "layer"), kronecker(across, "layer")) < EXACT


# 7


def plain(depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [part for _ in range(depth) for part in (nn.Linear(4, 4), nn.Tanh())]
    return nn.Sequential(*layers).double()


def classified(examples: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(examples, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 4, (examples,), generator=generator)


def test_a_nan_names_its_layer_its_batch_and_its_count() -> None:
    """Elsewhere one NaN ends in `ill-conditioned` after the last batch, and names nothing."""

    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([torch.sqrt(50 - x[:, :1]), x[:, 1:]], 1)

    model = plain()
    model[1], model[3] = nn.Identity(), Broken()
    x, y = classified()
    # the only example of which the square root meets a negative number
    x[13] = 1e6 * torch.sign(model[2].weight.detach()[0] @ model[0].weight.detach())
    with pytest.raises(NonFiniteLoss) as caught:
        collect(model, [(x, y)], "classification", batch_size=4)
    assert caught.value.layer == "3"
    said = str(caught.value)
    assert "batch 3 (examples 12 to 13); the first module to put out such numbers is `3` (Broken), 1 of 8" in said


def test_a_sum_that_overflows_names_its_layer_and_batch_at_once() -> None:
    """And an activation whose square overflows is noticed at its batch, not hours later."""
    model = plain().float()
    x, y = classified()
    x[6] = 1e25
    with pytest.raises(NonFiniteFactor) as caught:
        collect(model, [(x.float(), y)], "classification", batch_size=4, dtype="float32")
    assert caught.value.layer == "0"
    assert "after batch 1 (examples 4 to 7)" in str(caught.value)


@pytest.mark.parametrize("broken", ["first solver", "every solver"])
def test_a_decomposition_that_fails_late_loses_no_earlier_layer(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere the solver dies at layer 48 of 49 and takes 47 with it, the context of the device too, or the whole
    process by `exit()`. Here another solver takes over, and where none can, the rows before stand and are not
    computed again.
    """
    x, y = classified()
    solvers, allowed = 0, 10**6
    solve = torch.linalg.eigvalsh

    def fails_late(matrix: Tensor) -> Tensor:
        nonlocal solvers
        solvers += 1
        if solvers > allowed:
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        return solve(matrix)

    monkeypatch.setattr(torch.linalg, "eigvalsh", fails_late)
    truth: dict[str, Any] = {}
    needed = []
    for row in Capacity(CapacityParams(), workspace(plain(), [(x, y)], "classification", fisher="mc")).rows():
        truth[row.layer] = row
        needed.append(solvers)
    last = row.layer
    solvers, allowed = 0, needed[-2]
    if broken == "every solver":
        monkeypatch.setattr(eigensolvers.lapack, "dsyevr", lambda *_, **__: ([], None, 0, [], 1))
    space = workspace(plain(), [(x, y)], "classification", fisher="mc")
    rows: list[Any] = []
    if broken == "first solver":
        rows.extend(Capacity(CapacityParams(), space).rows())
        assert rows[-1].layer == last
        assert rows[-1].record.rungs_G[-1] == "host_syevr"
        assert rows[0].record.rungs_G == truth[rows[0].layer].record.rungs_G
    else:
        with pytest.raises(NotConverged, match=f"layer `{last}`"):
            rows.extend(Capacity(CapacityParams(), space).rows())
        again = iter(Capacity(CapacityParams(), space).rows())
        rows = [next(again) for _ in range(3)]
        monkeypatch.undo()
        later = workspace(plain(), [(x, y)], "classification", fisher="mc")
        later.resume.completed = frozenset(("capacity", row.ordinal) for row in rows)
        rest = list(Capacity(CapacityParams(), later).rows())
        assert [row.layer for row in rest] == [last]
        rows.extend(rest)
    assert len(rows) == 4
    for row in rows:
        assert row.metrics.trace == pytest.approx(truth[row.layer].metrics.trace, rel=1e-12)


# 8


def test_the_head_of_a_language_model_is_measured_within_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere the head is left out, or set by hand, or asks for terabytes. Here its factors are in the plan, are
    collected in slices or in further passes where they do not fit beside the others, and are refused beforehand by
    number where they cannot fit at all.
    """
    # what the process holds moves by more than these factors
    monkeypatch.setattr(job_plan, "resident_bytes", lambda: 0)
    vocabulary = 600
    model = gpt2(vocabulary)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    ids = tokens(64, 16, vocabulary)

    def within(host_bytes: int, plans: list[Any]) -> FactorSet:
        made = workspace(model, [({"input_ids": ids}, None)], "causal_lm", fisher="mc", dtype="float32", batch_size=64)
        made.ports.scratch, made.ports.announce_plan = MemoryArtifacts(), plans.append
        made.machine.budget = MemoryBudget(device_bytes=2**62, host_bytes=host_bytes)
        return collect_or_read(made)

    plans: list[Any] = []
    whole = within(2**62, plans)
    (head,) = [layer for layer in whole.layers if layer.name == "lm_head"]
    truth = whole.load(head.ordinal).G
    assert truth.shape == (vocabulary, vocabulary)
    assert next(term["size_bytes"] for term in plans[0]["terms"] if term["name"] == "accumulators") > truth.nbytes
    smaller = within(plans[0]["host_peak_bytes"] - 1, plans)
    assert plans[1]["host_peak_bytes"] < plans[0]["host_peak_bytes"]
    how = ("parts", "micro_batch", "activation_checkpointing")
    assert [plans[1][each] for each in how] != [plans[0][each] for each in how]
    assert relative_error(smaller.load(head.ordinal).G, truth) < 1e-5
    with pytest.raises(BudgetExceeded, match=r"the plan needs .* of host memory and the budget is"):
        within(LIBRARY_BYTES, plans)


# 9


class Attentive(nn.Module):
    """One head of attention, by torch's fused operation or written out."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.fused = fused
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.fused:
            mixed = functional.scaled_dot_product_attention(q, k, v)
        else:
            mixed = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(8), -1) @ v
        return self.out(mixed).mean(1)


class OnceOnly(torch.autograd.Function):
    """A tanh whose backward pass has no derivative, as that of a fused attention kernel has none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient * (1 - y.square())


def test_the_plan_says_the_memory_of_every_stage_beforehand() -> None:
    """Elsewhere the question has no answer before the machine runs out. Here each term says what, where, when and
    from which formula, before the first batch of the data enters anything.
    """
    model = plain()
    batches: list[int] = []
    # dry runs are of five examples at most
    model.register_forward_pre_hook(lambda _, args: batches.append(1) if len(args[0]) > 5 else None)
    space = workspace(model, [classified()], "classification", fisher="mc", batch_size=8)
    seen: list[tuple[Any, int]] = []
    space.ports.announce_plan = lambda plan: seen.append((plan, len(batches)))
    collect_or_read(space)
    ((plan, before),) = seen
    assert before == 0 < len(batches)
    assert all({"formula", "size_bytes", "place", "source", "stage"} <= term.keys() for term in plan["terms"])
    assert {term["stage"] for term in plan["terms"]} >= {"collection", "decomposition"}
    for place in ("device", "host"):
        stages = []
        for stage in ("collection", "decomposition"):
            held = [t for t in plan["terms"] if t["place"] == place and t["stage"] in (stage, "throughout")]
            # one layer at a time is decomposed
            by_layer = {t["layer"]: sum(u["size_bytes"] for u in held if u["layer"] == t["layer"]) for t in held}
            stages.append(by_layer.pop(None, 0) + max(by_layer.values(), default=0))
        assert plan[f"{place}_peak_bytes"] == max(stages)


def test_the_exact_fisher_needs_no_second_derivative_of_the_model() -> None:
    """Elsewhere the Gauss-Newton matrix is taken by differentiating twice, which fused attention refuses. Here the
    Hessian of the loss is known, and the model is differentiated once.
    """
    x, y = torch.randn(5, 6, 8, dtype=torch.float64), torch.randint(0, 8, (5,))
    fused, written = (
        collect(Attentive(fused=kind), [(x, y)], "classification", fisher="type2") for kind in (True, False)
    )
    for layer in written.layers:
        assert relative_error(kronecker(fused, layer.name), kronecker(written, layer.name)) < EXACT

    class Once(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return OnceOnly.apply(x)

    ordinary, once = plain(2), plain(2)
    once[1], once[3] = Once(), Once()
    a, b = classified()
    (gradient,) = torch.autograd.grad(functional.cross_entropy(once(a), b), [once[0].weight], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
    left, right = (collect(model, [(a, b)], "classification", fisher="type2") for model in (once, ordinary))
    for layer in right.layers:
        assert relative_error(kronecker(left, layer.name), kronecker(right, layer.name)) < EXACT


# 10


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("fisher", ["mc", "type2", "empirical"])
def test_results_do_not_depend_on_batches_or_their_order(fisher: str) -> None:
    """Elsewhere the sampled labels follow the order in which a generator is asked, so that another batch size, a
    shuffled loader or another number of processes is another result.
    """
    x, y = classified(21)
    index = torch.arange(21)
    reference = collect(plain(), [(x, y, index)], "classification", fisher=fisher, batch_size=21)
    order = torch.randperm(21, generator=torch.Generator().manual_seed(3))
    assert not torch.equal(order, index)
    for batch_size in (1, 4, 64):
        for data in ((x, y, index), (x[order], y[order], index[order])):
            other = collect(plain(), [data], "classification", fisher=fisher, batch_size=batch_size)
            for layer in reference.layers:
                one, two = other.load(layer.ordinal), reference.load(layer.ordinal)
                assert relative_error(one.A, two.A) < 1e-13
                assert relative_error(one.G, two.G) < 1e-12
    # shards of the data, as two processes would have them, add up to the whole
    shards = [
        collect(plain(), [(x[s], y[s], index[s])], "classification", fisher=fisher) for s in (order[:8], order[8:])
    ]
    for layer in reference.layers:
        parts = [shard.load(layer.ordinal).G * count for shard, count in zip(shards, (8, 13), strict=True)]
        assert relative_error((parts[0] + parts[1]) / 21, reference.load(layer.ordinal).G) < 1e-12
    twice = collect(plain(), [(x, y, index)], "classification", fisher=fisher, batch_size=21)
    assert digest(twice.load(0).G) == digest(reference.load(0).G)
