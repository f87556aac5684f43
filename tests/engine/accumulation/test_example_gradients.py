"""The exact trace of every layer's block, from squared gradients that never exist together."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from engine.accumulation import example_gradients
from engine.accumulation.example_gradients import squared_norms, squared_norms_numbers
from engine.analyses.factors import KeptFactors
from engine.factors.factor_set import FactorSet
from engine.layers.convolution import ConvolutionLayer
from engine.layers.layer import Use
from engine.layers.linear import LinearLayer
from engine.workspace import JobResults
from tests.memory_profile import peak_bytes
from tests.oracles import collect, curvature_traces, gradient_squares, workspace

EXACT = 1e-10


class Language(nn.Module):
    """A table with repeated ids, norms, wide and narrow maps, one used twice, a bias alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.wide = nn.Linear(4, 9)
        self.narrow = Conv1D(3, 9)
        self.twice = nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3)
        self.frozen.weight.requires_grad_(False)
        self.unbiased = nn.Linear(3, 4, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.wide(self.norm(self.table(ids))))
        x = self.twice(torch.tanh(self.twice(torch.tanh(self.narrow(x)))))
        # positions meet, as they do in attention
        x = x + x.cumsum(1).square()
        return self.unbiased(self.norm_again(torch.tanh(self.frozen(x))))

    def norm_again(self, x: Tensor) -> Tensor:
        padded = nn.functional.pad(x, (0, 1))
        return self.norm(padded)[..., :3] + x


class Checkpointed(Language):
    """The same, a part of which runs again in the backward pass: a norm of two calls, one of them outside."""

    reentrant = True

    def norm_again(self, x: Tensor) -> Tensor:
        found = checkpoint(super().norm_again, x, use_reentrant=self.reentrant)
        assert isinstance(found, Tensor)
        return found


class CheckpointedAnew(Checkpointed):
    reentrant = False


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3, padding=1)
        self.group = nn.GroupNorm(3, 3)
        self.strided = nn.Conv2d(3, 4, 2, stride=2, dilation=2, padding=2, padding_mode="reflect", bias=False)
        self.batch = nn.BatchNorm2d(4)
        self.back = nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1, output_padding=1)
        self.line = nn.Conv1d(2, 6, 1, groups=2)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.group(self.first(x)))
        x = torch.tanh(self.back(torch.tanh(self.batch(self.strided(x)))))
        return self.head(torch.tanh(self.line(x.flatten(2))).mean(2))


def language(make: Callable[[], nn.Module] = Language) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(3)
    model = make().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.7)
    return model, torch.randint(0, 5, (7, 6)), torch.randint(0, 4, (7, 6))


def images() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(4)
    model = Images().double()
    model(torch.randn(9, 2, 6, 6, dtype=torch.float64))  # running statistics that are not trivial
    return model.eval(), torch.randn(6, 2, 6, 6, dtype=torch.float64), torch.randint(0, 3, (6,))


def squares(model: nn.Module, x: Tensor, y: Tensor, fisher: str) -> dict[str, Tensor]:
    found = (curvature_traces if fisher == "type2" else gradient_squares)(model, x, y, "cross_entropy")
    own = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: each for name, each in found.items() if name in own}


def check(whole: FactorSet, truth: dict[str, Tensor], terms: int) -> None:
    assert whole.declared == ()
    found: dict[str, float] = defaultdict(float)
    names: dict[str, tuple[str, ...]] = {}
    for layer in whole.layers:
        # the rows of one layer's groups are told apart by a number
        own = tuple(name.partition("[")[0] for name in layer.parameters)
        assert layer.exact_trace is not None
        found[own[0]] += layer.exact_trace
        names[own[0]] = own
    assert {name for own in names.values() for name in own} == set(truth)
    expected = {first: sum(float(truth[name].sum()) for name in own) / terms for first, own in names.items()}
    assert found == pytest.approx(expected, rel=EXACT)


@pytest.mark.part(of=24, by=("way",))
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # the dry run, under no_grad
@pytest.mark.parametrize(("fisher", "way"), [("empirical", "gram"), ("empirical", "product"), ("type2", "cheaper")])
@pytest.mark.parametrize("make", [Language, Checkpointed, CheckpointedAnew])
def test_trace_of_sequence_layers_is_exact(
    fisher: str, way: str, make: type[Language], monkeypatch: pytest.MonkeyPatch
) -> None:
    if way != "cheaper":
        monkeypatch.setattr(example_gradients, "gram_is_cheaper", lambda *_: way == "gram")
    model, x, y = language(make)
    plain = Language().double()
    plain.load_state_dict(model.state_dict())
    check(collect(model, [(x, y)], "classification", fisher=fisher), squares(plain, x, y, fisher), 42)


@pytest.mark.part(of=32, by=("gram",))
@pytest.mark.parametrize(("fisher", "numbers"), [("type2", 2**22), ("empirical", 2**22), ("empirical", 400)])
@pytest.mark.parametrize("gram", [False, True])
def test_trace_of_convolutions_is_exact_however_it_is_cut(
    fisher: str, numbers: int, gram: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example_gradients, "gram_is_cheaper", lambda *_: gram)
    monkeypatch.setattr(example_gradients, "NUMBERS_AT_ONCE", numbers)
    model, x, y = images()
    check(collect(model, [(x, y)], "classification", fisher=fisher), squares(model, x, y, fisher), 6)


@pytest.mark.parametrize("masked", [False, True])
def test_trace_of_a_tied_head_holds_the_cross_terms(masked: bool) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.inner = nn.Embedding(6, 4), nn.Linear(4, 4)
            self.head = nn.Linear(4, 6)
            self.head.weight = self.table.weight

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            x = torch.tanh(self.inner(self.table(input_ids)))
            return self.head(x if attention_mask is None else x * attention_mask[..., None])

    torch.manual_seed(0)
    model = Tied().double()
    ids, y = torch.randint(0, 6, (5, 7)), torch.randint(0, 6, (5, 7))
    lengths = torch.tensor([7, 3, 5, 1, 6] if masked else [7] * 5)
    mask = (torch.arange(7) < lengths[:, None]).long()
    whole = collect(
        model, [({"input_ids": ids, "attention_mask": mask}, torch.where(mask > 0, y, -100))], "masked_lm",
        fisher="empirical",
    )  # fmt: skip
    expected: dict[str, float] = defaultdict(float)
    for example, target, length in zip(ids, y, lengths.tolist(), strict=True):
        outputs = model(example[None, :length])
        loss = nn.functional.cross_entropy(outputs[0], target[:length], reduction="sum")
        model.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            expected[name] += float(parameter.grad.square().sum()) / int(lengths.sum())  # type: ignore[union-attr]
    for layer in whole.layers:
        assert layer.exact_trace == pytest.approx(sum(expected.pop(name) for name in layer.parameters), rel=EXACT)
    assert expected == {}


@pytest.mark.parametrize("gram", [False, True])
def test_each_group_of_a_convolution_has_its_own_trace(gram: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example_gradients, "gram_is_cheaper", lambda *_: gram)
    torch.manual_seed(0)
    conv = nn.Conv1d(4, 6, 3, groups=2).double()
    model = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(24, 3)).double()
    x, y = torch.randn(5, 4, 6, dtype=torch.float64), torch.randint(0, 3, (5,))
    whole = collect(model, [(x, y)], "classification", fisher="empirical")
    totals = torch.zeros(2, dtype=torch.float64)
    for example, target in zip(x, y, strict=True):
        loss = nn.functional.cross_entropy(model(example[None]), target[None])
        weight, bias = torch.autograd.grad(loss, [conv.weight, conv.bias])
        totals += (weight.flatten(1).square().sum(1) + bias.square()).view(2, 3).sum(1)
    found = [layer.exact_trace for layer in whole.layers[:2]]
    assert found == pytest.approx((totals / 5).tolist(), rel=EXACT)


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_neither_sharing_nor_batches_change_the_trace(sharing: str, batch_size: int) -> None:
    model, x, y = language()
    whole = collect(model, [(x, y)], "classification", sharing=sharing, batch_size=batch_size)
    check(whole, squares(model, x, y, "type2"), 42)


def test_sampled_trace_converges_to_the_exact_one() -> None:
    model, x, y = images()
    truth = collect(model, [(x, y)], "classification")
    sampled = collect(model, [(x, y)], "classification", fisher="mc", samples=100, batch_size=6)
    for layer, exact in zip(sampled.layers, truth.layers, strict=True):
        assert layer.exact_trace == pytest.approx(exact.exact_trace, rel=0.25)


def test_padding_is_no_part_of_the_trace() -> None:
    class Masked(Language):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return super().forward(input_ids)

    model, _, _ = language(Masked)
    lengths = [3, 6, 2, 4]
    sequences = [torch.randint(0, 5, (1, length)) for length in lengths]
    padded, mask = torch.full((4, 6), 2), torch.zeros(4, 6, dtype=torch.int64)
    targets = torch.full((4, 6), -100)
    for row, sequence in enumerate(sequences):
        padded[row, : lengths[row]], mask[row, : lengths[row]] = sequence[0], 1
        targets[row, : lengths[row]] = sequence[0] % 4
    apart = [({"input_ids": s, "attention_mask": torch.ones_like(s)}, s % 4) for s in sequences]
    together = [({"input_ids": padded, "attention_mask": mask}, targets)]
    for one, other in zip(
        collect(model, apart, "masked_lm").layers, collect(model, together, "masked_lm").layers, strict=True
    ):
        assert one.terms == other.terms == 15
        assert other.exact_trace == pytest.approx(one.exact_trace, rel=1e-12)
        assert other.trace_standard_error == pytest.approx(one.trace_standard_error, rel=1e-9)


@pytest.mark.parametrize("gram", [False, True])
def test_routed_rows_are_grouped_by_their_example(gram: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert sees tokens of several examples in any order, none of some."""
    monkeypatch.setattr(example_gradients, "gram_is_cheaper", lambda *_: gram)
    monkeypatch.setattr(example_gradients, "NUMBERS_AT_ONCE", 40)
    torch.manual_seed(0)
    module = nn.Linear(3, 2).double()
    layer = LinearLayer("expert", module, weight=True, bias=True)
    met, truth = [], torch.zeros(5, 2, 4, dtype=torch.float64)
    for count in (9, 0, 4):
        owners = torch.randint(0, 4, (count,)) + 1
        a, g = torch.randn(count, 3, dtype=torch.float64), torch.randn(count, 2, dtype=torch.float64)
        kept = torch.rand(count) < 0.7
        met.append((Use(entered=a, examples=5, kept=kept, owners=owners), g))
        outer = g[:, :, None] * torch.cat([a, torch.ones(count, 1, dtype=torch.float64)], 1)[:, None]
        truth.index_add_(0, owners[kept], outer[kept])
    found = squared_norms(layer, met, torch.float64)
    assert torch.allclose(found[:, 0], truth.square().sum((1, 2)), rtol=1e-12, atol=0)
    nobody = squared_norms(layer, met[1:2], torch.float64)
    assert torch.equal(nobody, torch.zeros(5, 1, dtype=torch.float64))


def test_standard_error_is_the_ratio_estimators() -> None:
    model, x, y = language()
    y[0, 1:] = -100
    y[3, 2:] = -100
    whole = collect(model, [(x, y)], "masked_lm", fisher="mc", batch_size=3)
    for layer in whole.layers:
        assert layer.trace_standard_error is not None
    # one example at a time, under the same labels, gives s_n
    index = torch.arange(7)
    alone = [
        collect(model, [(x[n : n + 1], y[n : n + 1], index[n : n + 1])], "masked_lm", fisher="mc").layers
        for n in range(7)
    ]
    m = torch.tensor([each[0].terms for each in alone], dtype=torch.float64)
    assert m.tolist() == [1, 6, 6, 2, 6, 6, 6]
    for place, layer in enumerate(whole.layers):
        s = torch.tensor([each[place].exact_trace for each in alone], dtype=torch.float64) * m
        ratio = s.sum() / m.sum()
        expected = math.sqrt(float(7 / 6 * (s - ratio * m).square().sum())) / float(m.sum())
        assert layer.exact_trace == pytest.approx(float(ratio), rel=1e-12)
        assert layer.trace_standard_error == pytest.approx(expected, rel=1e-9)
        assert alone[0][place].trace_standard_error is None


@pytest.mark.nightly(
    covered_by="tests/engine/accumulation/test_example_gradients.py::test_standard_error_is_the_ratio_estimators"
)
def test_standard_error_is_the_spread_of_samples() -> None:
    """Of many samples of 16 examples, the traces scatter as each says that it does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2)).double()
    found = []
    for _ in range(100):
        x, y = torch.randn(16, 3, dtype=torch.float64), torch.randint(0, 2, (16,))
        (layer,) = collect(model, [(x, y)], "classification", batch_size=16).layers
        found.append((layer.exact_trace, layer.trace_standard_error))
    traces, errors = torch.tensor(found, dtype=torch.float64).T
    assert float(errors.square().mean().sqrt()) == pytest.approx(float(traces.std()), rel=0.25)


def test_averaging_weighs_the_trace_as_it_weighs_the_factors() -> None:
    model, x, y = images()
    halves = [collect(model, [(x[s], y[s])], "classification").layers for s in (slice(0, 3), slice(3, 6))]
    decayed = collect(model, [(x, y)], "classification", batch_size=3, ema_decay=0.5).layers
    second = collect(model, [(x, y)], "classification", batch_size=3, update_freq=2).layers
    for first, other, blend, skipping in zip(*halves, decayed, second, strict=True):
        assert first.exact_trace is not None
        assert other.exact_trace is not None
        assert blend.exact_trace == pytest.approx((0.5 * first.exact_trace + other.exact_trace) / 1.5, rel=1e-12)
        assert blend.trace_standard_error is None
        assert skipping.exact_trace == pytest.approx(first.exact_trace, rel=1e-12)


def test_it_changes_no_factor_and_can_be_left_out() -> None:
    model, x, y = language()
    rows = {}
    for wanted in (True, False):
        space = workspace(model, [(x, y)], "classification", fisher="mc", exact_trace=wanted)
        space.options.kinds = ("factors",)
        rows[wanted] = list(KeptFactors(None, space).rows())
    for on, off in zip(rows[True], rows[False], strict=True):
        assert (on.record.digest_A, on.record.digest_G) == (off.record.digest_A, off.record.digest_G)
        assert on.record.kronecker_trace == pytest.approx(on.metrics.trace_A * on.metrics.trace_G, rel=1e-15)
        assert on.record.trace_ratio == pytest.approx(on.record.kronecker_trace / on.record.exact_trace, rel=1e-15)
        assert on.metrics.trace_ratio == on.record.trace_ratio
        assert (off.record.exact_trace, off.record.trace_ratio, off.record.trace_standard_error) == (None, None, None)


def test_forward_only_and_stored_factors() -> None:
    model, x, y = language()
    whole = collect(model, [(x, y)], "classification", fisher="forward_only")
    assert {layer.exact_trace for layer in whole.layers} == {None}
    space = workspace(model, [(x, y)], "classification")
    space.options.kinds = ("factors",)
    made = [row.record.exact_trace for row in KeptFactors(None, space).rows()]
    again = dataclasses.replace(
        space,
        inputs=dataclasses.replace(space.inputs, model=None, batches=None, task=None, stored=space.ports.artifacts),
        results=JobResults(),
    )
    assert [row.record.exact_trace for row in KeptFactors(None, again).rows()] == made
    # an index of before there were exact traces is read without
    for entry in space.ports.artifacts.load_json("factors/factors.index.json")["layers"]:
        del entry["exact_trace"], entry["trace_standard_error"]
    again.results = JobResults()
    assert {row.record.exact_trace for row in KeptFactors(None, again).rows()} == {None}


@pytest.mark.parametrize(("channels", "width", "extent"), [(32, 32, 32), (64, 128, 8)])
def test_what_a_convolution_takes_is_what_the_plan_says(channels: int, width: int, extent: int) -> None:
    # the gradients themselves are fewer multiplications for the first, the positions' products for the second
    module = nn.Conv2d(channels, width, 3, padding=1)
    layer = ConvolutionLayer(name="", module=module, weight=True, bias=True)
    positions = extent**2
    assert example_gradients.gram_is_cheaper(positions, layer.fan_in, layer.fan_out) == (extent == 8)
    examples = 3 * example_gradients.NUMBERS_AT_ONCE // (positions * (layer.fan_in + layer.fan_out))
    use = Use(entered=torch.randn(examples, channels, extent, extent), examples=examples, role=layer)
    gradient = torch.randn(examples, width, extent, extent)
    peak = peak_bytes(lambda: squared_norms(layer, [(use, gradient)], torch.float32))
    assert 0.8 <= 4 * squared_norms_numbers(layer, examples, positions) / peak <= 1.1
