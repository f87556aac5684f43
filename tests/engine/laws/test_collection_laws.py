"""What collection must not depend on, must not touch, and must not hide."""

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from catalog.requests.collection import Stabilisation
from engine.analyses.factors import KeptFactors
from engine.collect import collect_or_read
from engine.errors import (
    BudgetExceeded,
    EmptyData,
    ModelRefused,
    NonFiniteLoss,
    NonFiniteModel,
    NothingToAnalyse,
    StopRequested,
    WrongShape,
)
from engine.measurement.layer_measurement import measure_layers
from engine.memory.budget import MemoryBudget
from tests.oracles import MemoryArtifacts, collect, relative_error, workspace


def small_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.LayerNorm(6), nn.Linear(6, 3)).double()


def data(examples: int = 23) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(examples, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (examples,), generator=generator)


@pytest.mark.part(of=24, by=("fisher",))
@pytest.mark.parametrize("fisher", ["mc", "type2", "empirical"])
@pytest.mark.parametrize("batch_size", [1, 5, 23, 64])
def test_batch_size_changes_nothing_but_rounding(fisher: str, batch_size: int) -> None:
    x, y = data()
    reference = collect(small_net(), [(x, y)], "classification", fisher=fisher, batch_size=8)
    other = collect(small_net(), [(x, y)], "classification", fisher=fisher, batch_size=batch_size)
    for ordinal in range(3):
        assert relative_error(other.load(ordinal).A, reference.load(ordinal).A) < 1e-13
        assert relative_error(other.load(ordinal).G, reference.load(ordinal).G) < 1e-13


def test_chunks_of_the_stream_change_nothing() -> None:
    x, y = data()
    whole = collect(small_net(), [(x, y)], "classification", fisher="mc", batch_size=8)
    pieces = [(x[:3], y[:3]), (x[3:4], y[3:4]), (x[4:], y[4:])]
    cut = collect(small_net(), pieces, "classification", fisher="mc", batch_size=8)
    assert torch.equal(cut.load(0).G, whole.load(0).G)


def test_indexed_examples_keep_their_labels_in_any_order() -> None:
    x, y = data()
    index = torch.arange(23)
    order = torch.randperm(23, generator=torch.Generator().manual_seed(1))
    straight = collect(small_net(), [(x, y, index)], "classification", fisher="mc")
    shuffled = collect(small_net(), [(x[order], y[order], index[order])], "classification", fisher="mc")
    unkeyed = collect(small_net(), [(x[order], y[order])], "classification", fisher="mc")
    assert relative_error(shuffled.load(0).G, straight.load(0).G) < 1e-13
    # without the index, position keys the label: the test can tell the difference
    assert relative_error(unkeyed.load(0).G, straight.load(0).G) > 1e-3


def test_same_job_twice_has_the_same_digests() -> None:
    x, y = data()
    digests = []
    for _ in range(2):
        space = workspace(small_net(), [(x.float(), y)], "classification", fisher="mc", dtype="float32")
        space.options.kinds = ("factors",)
        digests.append([(row.record.digest_A, row.record.digest_G) for row in KeptFactors(None, space).rows()])
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 3


def test_model_is_left_as_found_even_when_stopped() -> None:
    model = small_net().float()
    model.train()
    model[3].bias.requires_grad_(False)
    nn.functional.cross_entropy(model(torch.randn(5, 4)), torch.randint(0, 3, (5,))).backward()
    before = copy.deepcopy(model.state_dict())
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    pointers = [p.data_ptr() for p in model.parameters()]
    flags = [p.requires_grad for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    state = torch.random.get_rng_state()
    x, y = data()
    for stop_at in (None, 2):
        space = workspace(model, [(x, y)], "classification", fisher="mc")
        calls = iter(range(100))

        def checkpoint(stop: int | None = stop_at, calls: object = calls) -> None:
            if next(calls) == stop:  # type: ignore[call-overload]
                raise StopRequested

        space.ports.raise_if_cancelled = checkpoint
        if stop_at is None:
            collect_or_read(space)
        else:
            with pytest.raises(StopRequested):
                collect_or_read(space)
        assert [p.data_ptr() for p in model.parameters()] == pointers
        assert [p.requires_grad for p in model.parameters()] == flags
        assert [m.training for m in model.modules()] == modes
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert all(
            (p.grad is None and g is None) or torch.equal(p.grad, g)
            for p, g in zip(model.parameters(), gradients, strict=True)
        )
        assert torch.equal(torch.random.get_rng_state(), state)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Projections(nn.Module):
    """q, k and v of one input, another layer of a copy, one of an equal tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 4, bias=False)
        self.other = nn.Linear(4, 3)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.q(x)) + self.k(x) + self.v(x)[:, :3] + self.other(x.clone())


def test_layers_of_one_input_share_one_activation_factor() -> None:
    torch.manual_seed(0)
    x, y = data()
    whole = collect(Projections().double(), [(x, y)], "classification", fisher="mc")
    leader = {layer.name: layer.shared_A_with for layer in whole.layers}
    # v has no column of ones and `other` another tensor, however equal
    assert leader == {"q": None, "k": 0, "v": None, "other": None, "out": None}
    assert whole.load(1).A is whole.load(0).A
    assert torch.equal(whole.load(3).A, whole.load(0).A)


def test_sharing_that_breaks_in_a_later_batch_is_undone() -> None:
    class Fickle(Projections):
        def forward(self, x: Tensor) -> Tensor:
            # each example by itself: those of the second batch are marked
            again = torch.where(x[:, :1] > 50, x * 2, x) if bool((x[:, 0] > 50).any()) else x
            return self.q(x)[:, :3] + self.k(again)

    torch.manual_seed(0)
    x, y = data(8)
    x[4:, 0] = 100.0
    whole = collect(Fickle().double(), [(x, y)], "classification", fisher="mc", batch_size=4)
    assert [layer.shared_A_with for layer in whole.layers] == [None, None]
    assert whole.passes == 2
    assert relative_error(whole.load(1).A, whole.load(0).A) > 0.1


def test_every_trainable_parameter_is_covered_or_declared() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 4)
            self.scale = nn.Parameter(torch.ones(4))
            self.inner = nn.Linear(4, 4)
            self.grouped = nn.Conv2d(4, 4, 1, groups=2, bias=False)
            self.recurrent = nn.LSTM(4, 4, batch_first=True)
            self.unused = nn.Linear(4, 4)
            self.ignored = nn.Linear(4, 2)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.table.weight
            self.frozen = nn.Linear(4, 4)
            self.frozen.requires_grad_(False)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.inner(self.table(ids)) * self.scale
            x = self.normed(self.frozen(x))
            self.ignored(x)
            x, _ = self.recurrent(x)
            x = self.grouped(x.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2)
            return self.head(x)

    torch.manual_seed(0)
    model = Mixed().double()
    ids = torch.randint(0, 7, (6, 5))
    whole = collect(model, [(ids, ids)], "causal_lm", fisher="mc")
    reasons = {layer.name: layer.reason for layer in whole.declared}
    assert reasons == {
        "unused": "no_gradient",
        "ignored": "no_gradient",
    }
    recurrent = ["recurrent.weight_ih_l0", "recurrent.weight_hh_l0"]
    normed = [
        f"normed.{name}" for name in ("bias", "parametrizations.weight.original0", "parametrizations.weight.original1")
    ]
    plain = ["scale", "table", "inner", "grouped[0]", "grouped[1]"]
    assert [layer.name for layer in whole.layers] == [*plain, *recurrent, *normed]
    assert whole.layers[4].parameters == ("grouped.weight[1]",)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert whole.trainable_parameters == trainable
    assert whole.covered_parameters + sum(layer.parameter_count for layer in whole.declared) == trainable


def test_an_adapter_that_overrides_forward_is_the_linear_layer_within() -> None:
    class Adapted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    model = nn.Sequential(Adapted(4, 4), nn.Linear(4, 3)).double()
    x, y = data()
    whole = collect(model, [(x, y)], "classification")
    assert whole.declared == ()

    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    inner = nn.Linear(4, 4).double()
    inner.load_state_dict(model[0].state_dict())
    truth = collect(nn.Sequential(inner, Doubled(), model[1]), [(x, y)], "classification")
    assert torch.equal(whole.load(0).A, truth.load(0).A)
    assert relative_error(whole.load(0).G, truth.load(0).G) < 1e-14


def test_hugging_face_conv1d_is_linear() -> None:
    torch.manual_seed(0)
    linear = nn.Sequential(nn.Linear(4, 3)).double()
    transposed = nn.Sequential(Conv1D(3, 4)).double()
    transposed[0].weight.data = linear[0].weight.data.T.clone()
    transposed[0].bias.data = linear[0].bias.data.clone()
    x, y = data()
    left, right = (collect(model, [(x, y)], "classification").load(0) for model in (linear, transposed))
    assert relative_error(right.A, left.A) < 1e-14
    assert relative_error(right.G, left.G) < 1e-13


class Tokens(nn.Module):
    """A language model in miniature that knows attention masks."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.norm = nn.LayerNorm(4)
        self.inner = nn.Linear(4, 5)
        self.head = nn.Linear(5, 9)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(torch.tanh(self.inner(self.norm(self.table(input_ids)))))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_padding_counts_nowhere(sharing: str) -> None:
    torch.manual_seed(0)
    model = Tokens().double()
    lengths = [3, 5, 2]
    sequences = [torch.randint(0, 9, (1, length)) for length in lengths]
    one_by_one = [({"input_ids": s, "attention_mask": torch.ones_like(s)}, s) for s in sequences]
    padded = torch.full((3, 6), 8)
    mask = torch.zeros(3, 6, dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        padded[row, : sequence.shape[1]] = sequence[0]
        mask[row, : sequence.shape[1]] = 1
    together = [({"input_ids": padded, "attention_mask": mask}, padded)]
    for fisher in ("mc", "type2"):
        apart = collect(model, one_by_one, "causal_lm", fisher=fisher, sharing=sharing)
        joined = collect(model, together, "causal_lm", fisher=fisher, sharing=sharing)
        assert [layer.positions for layer in joined.layers] == [10] * 4
        assert [layer.terms for layer in joined.layers] == [7] * 4
        for ordinal in range(4):
            assert relative_error(joined.load(ordinal).A, apart.load(ordinal).A) < 1e-13
            assert relative_error(joined.load(ordinal).G, apart.load(ordinal).G) < 1e-13


def test_ignored_targets_remove_loss_terms_and_no_positions() -> None:
    torch.manual_seed(0)
    model = Tokens().double()
    ids = torch.randint(0, 9, (2, 5))
    targets = ids.clone()
    targets[0, 3:] = -100
    whole = collect(model, [(ids, targets)], "causal_lm")
    assert whole.layers[0].positions == 10
    assert whole.layers[0].terms == 2 + 4


def test_a_prompt_counts_and_has_no_terms() -> None:
    torch.manual_seed(0)
    model = Tokens().double()
    ids = torch.randint(0, 9, (3, 6))
    targets = ids.clone()
    targets[:, :3] = -100
    whole = collect(model, [(ids, targets)], "causal_lm")
    head = whole.layers[3]
    assert (head.positions, head.terms) == (3 * 6, 3 * 3)
    probability = torch.softmax(model(ids)[:, 2:5], -1).detach().flatten(0, 1)
    exact = (torch.diag_embed(probability) - probability[:, :, None] * probability[:, None]).mean(0)
    assert relative_error(whole.load(3).G, exact) < 1e-12


def test_averaging_modes() -> None:
    x, y = data(16)
    halves = [collect(small_net(), [(x[s], y[s])], "classification") for s in (slice(0, 8), slice(8, 16))]
    plain = collect(small_net(), [(x, y)], "classification", batch_size=8)
    every_second = collect(small_net(), [(x, y)], "classification", batch_size=8, update_freq=2)
    decayed = collect(small_net(), [(x, y)], "classification", batch_size=8, ema_decay=0.5)
    first, second = (half.load(0).A for half in halves)
    assert relative_error(plain.load(0).A, (first + second) / 2) < 1e-14
    assert relative_error(every_second.load(0).A, first) < 1e-14
    assert every_second.updates == 1
    assert relative_error(decayed.load(0).A, (0.5 * first + second) / 1.5) < 1e-14


def test_forward_only_takes_the_identity() -> None:
    x, y = data()
    whole = collect(small_net(), [(x, y)], "classification", fisher="forward_only")
    assert torch.equal(whole.load(0).G, torch.eye(6, dtype=torch.float64))
    assert [(layer.name, layer.reason) for layer in whole.declared] == [("2", "needs_gradients")]


def refused(**changes: object) -> None:
    x, y = data()
    space = workspace(small_net(), [(x, y)], "classification")
    for name, value in changes.items():
        setattr(space.machine if name == "budget" else space.inputs, name, value)
    collect_or_read(space)


def test_bad_models_and_data_are_refused_by_name() -> None:
    x, y = data()
    broken = small_net()
    broken[3].weight.data[1, 2] = float("nan")
    with pytest.raises(NonFiniteModel, match=r"`3\.weight` holds 1 NaN"):
        refused(model=broken)
    with pytest.raises(EmptyData, match="no example"):
        refused(batches=lambda: iter(()))
    with pytest.raises(EmptyData, match="no loss term"):
        refused(batches=lambda: iter([(x, torch.full_like(y, -100))]))
    with pytest.raises(WrongShape, match="a target is 3, but the model has classes 0 to 2"):
        refused(batches=lambda: iter([(x, torch.full_like(y, 3))]))
    with pytest.raises(WrongShape, match=r"targets of shape \(4, 2\)"):
        refused(batches=lambda: iter([(x, torch.zeros(23, 2))]))
    with pytest.raises(WrongShape, match="agree on dimension 0"):
        refused(batches=lambda: iter([(x, y[:5])]))
    with pytest.raises(WrongShape, match="must yield"):
        refused(batches=lambda: iter([x]))
    with pytest.raises(ModelRefused, match="check that data and model belong together"):
        refused(batches=lambda: iter([(x[:, :3], y)]))
    with pytest.raises(NonFiniteLoss, match="inputs hold 8 NaN or infinite numbers in batch 0"):
        refused(batches=lambda: iter([(x * float("inf"), y)]))
    with pytest.raises(NothingToAnalyse, match="no trainable parameter"):
        refused(model=nn.Flatten())
    with pytest.raises(BudgetExceeded, match=r"raise `memory\.host`"):
        refused(budget=MemoryBudget(device_bytes=1, host_bytes=2**20))


def test_factors_read_back_as_collected() -> None:
    torch.manual_seed(0)
    x, y = data()
    space = workspace(Projections().double(), [(x, y)], "classification", fisher="mc")
    space.options.kinds = ("factors",)
    rows = list(KeptFactors(None, space).rows())
    store = space.ports.artifacts
    assert isinstance(store, MemoryArtifacts)
    again = workspace(nn.Flatten(), [], "classification")
    again.inputs.model, again.inputs.stored, again.options.stabilisation = None, store, Stabilisation()
    opened = collect_or_read(again)
    for row in rows:
        original, read = collect_or_read(space).load(row.ordinal), opened.load(row.ordinal)
        assert torch.equal(original.A, read.A)
        assert torch.equal(original.G, read.G)
    # the shared A is stored once
    assert set(store.tensors["factors/1.safetensors"]) == {"gradient_covariance"}


def test_rows_bound_the_rank_of_both_factors() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.LayerNorm(30), nn.Linear(30, 3))
    x, y = torch.randn(5, 40), torch.randint(0, 3, (5,))
    space = workspace(model, [(x, y)], "classification", fisher="mc", dtype="float32")
    layers = sorted(measure_layers(space), key=lambda layer: layer.facts.ordinal)
    for layer in layers[:2]:
        assert int((layer.G.spectrum > 0).sum()) == 5
    assert [int((layer.A.spectrum > 0).sum()) for layer in layers] == [5, 1, 5]
