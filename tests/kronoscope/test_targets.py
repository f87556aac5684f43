"""Targets are read as torch's losses read them, or refused with what to give; in silence never."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from catalog.requests.collection import Collection
from engine.collection.pass_job import PassJob
from engine.errors import EngineError, ModelRefused, WrongShape
from kronoscope.local import Measurement, measure
from tests.oracles import workspace

Run = Callable[..., subprocess.CompletedProcess[str]]
X = torch.randn(10, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.arange(10) % 3
SOFT = torch.rand(10, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).softmax(-1)
WEIGHTS = (0.5, 3.0, 1.25)


def net(outputs: int = 3, *last: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, outputs), *last).double()


def run(model: nn.Module, x: Any, y: Any, fisher: str = "empirical", size: int = 4, **task: Any) -> Measurement:
    return measure(
        model, [(x, y)], task={"type": "classification"} | task, kinds=("factors",),
        collection=Collection(fisher=fisher, dtype="float64", batch_size=size),
    )  # fmt: skip


def traces(found: Measurement) -> dict[str, float]:
    return {layer: row.metrics.exact_trace for layer, row in found.of("factors").items()}


def squares(model: nn.Module, losses: list[Tensor]) -> dict[str, float]:
    """Each layer's sum of squared gradients of the examples' losses, by plain autograd."""
    total = {name: 0.0 for name, layer in model.named_modules() if isinstance(layer, (nn.Linear, nn.Conv2d))}
    for loss in losses:
        gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        for (name, _), part in zip(model.named_parameters(), gradients, strict=True):
            total[name.rpartition(".")[0]] += float(part.square().sum())
    return total


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}], ids=["plain", "smoothed"])
@pytest.mark.parametrize("labels", ["soft", "onehot", "integers"])
def test_probabilities_of_classes_are_torchs_own(labels: str, options: dict[str, Any]) -> None:
    y = {"soft": SOFT, "onehot": functional.one_hot(Y, 3).double(), "integers": functional.one_hot(Y, 3)}[labels]
    model = net()
    losses = [functional.cross_entropy(model(x[None]), t[None].double(), **options) for x, t in zip(X, y, strict=True)]
    exact = squares(model, losses)
    assert traces(run(model, X, y, **options)) == pytest.approx({n: s / 10 for n, s in exact.items()}, rel=1e-12)


def test_weighed_probabilities_are_counts_over_the_number_of_terms() -> None:
    """A term of weight W is W terms: its square is that of its gradient over √W; and torch's mean divides by N."""
    model, weights = net(), torch.tensor(WEIGHTS, dtype=torch.float64)
    losses = [
        functional.cross_entropy(model(x[None]), t[None], weight=weights) / (t @ weights).sqrt()
        for x, t in zip(X, SOFT, strict=True)
    ]
    exact = {name: total / 10 for name, total in squares(model, losses).items()}
    assert traces(run(model, X, SOFT, class_weights=WEIGHTS)) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("fisher", ["mc", "type2"])
def test_fishers_without_labels_do_not_look_at_probabilities(fisher: str) -> None:
    hard, soft = (run(net(), X, y, fisher) for y in (Y, SOFT))
    for name in hard.factors:
        assert torch.equal(hard.factors[name].G, soft.factors[name].G)


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize("fisher", ["type2", "mc"])
@pytest.mark.parametrize("scale", [1.0, 1.009, 0.992])
def test_the_hessian_of_soft_labels_has_their_sum_and_nothing_else_of_them(fisher: str, scale: float) -> None:
    """Autograd's Hessian of torch's own loss; sums beside one are what rounding to 16 bits leaves."""
    model = nn.Linear(6, 3, bias=False).double()
    own = torch.autograd.functional.hessian(  # type: ignore[no-untyped-call]
        lambda w: functional.cross_entropy(X @ w.view(3, 6).T, SOFT * scale), model.weight.detach().flatten()
    )
    found = traces(run(model, X, SOFT * scale, fisher))["(model)"]
    if fisher == "type2":
        assert found == pytest.approx(float(own.trace()), rel=1e-12)
    else:
        # sampled labels are those of the model, whatever the data's: the weight of a term alone enters
        assert found == pytest.approx(scale * traces(run(model, X, SOFT, fisher))["(model)"], rel=1e-12)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([0.5, 0.4, 0.05], r"got example 7, which sums to 0\.95, with numbers from 0\.05\); .*targets\.sum"),
        ([0.8, 0.4, -0.2], r"got example 7, which sums to 1, with numbers from -0\.2"),
        ([0.0, 0.0, 0.0], r"got example 7, which sums to 0, with"),
        ([0.5, torch.nan, 0.5], r"got example 7, which sums to nan"),
    ],
)
def test_the_example_that_is_no_distribution_is_named(row: list[float], said: str) -> None:
    soft = SOFT.clone()
    soft[7] = torch.tensor(row)
    with pytest.raises(WrongShape, match=said) as caught:
        run(net(), X, soft, "type2")
    assert caught.value.pointer == "/data"


def test_probabilities_of_every_pixel_stand_where_torch_has_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1)).double()
    x, y = torch.randn(5, 2, 4, 4, dtype=torch.float64), torch.randn(5, 3, 4, 4, dtype=torch.float64).softmax(1)
    losses = [functional.cross_entropy(model(a[None]), b[None], reduction="sum") for a, b in zip(x, y, strict=True)]
    exact = squares(model, losses)["0"] / (5 * 16)
    assert traces(run(model, x, y))["0"] == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("last", [(), (nn.Flatten(0),)], ids=["column", "numbers"])
@pytest.mark.parametrize("shape", [(10,), (10, 1)])
def test_one_logit_of_each_example_goes_with_bce(last: tuple[nn.Module, ...], shape: tuple[int, ...]) -> None:
    model, y = net(1, *last), (Y > 0).reshape(shape)
    losses = [
        functional.binary_cross_entropy_with_logits(model(x[None]).flatten(), t.double().reshape(1))
        for x, t in zip(X, y, strict=True)
    ]
    exact = {name: total / 10 for name, total in squares(model, losses).items()}
    assert traces(run(model, X, y, loss="bce")) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("last", [(), (nn.Flatten(0),)], ids=["column", "numbers"])
@pytest.mark.parametrize(("fisher", "y"), [("mc", None), ("empirical", Y * 0), ("forward_only", Y * 0)])
def test_one_logit_under_cross_entropy_is_refused(last: tuple[nn.Module, ...], fisher: str, y: Tensor | None) -> None:
    with pytest.raises(WrongShape, match=r"take `task\.loss: bce`") as caught:
        run(net(1, *last), X, y, fisher)
    assert caught.value.pointer == "/task/loss"


@pytest.mark.parametrize("shape", [(5, 1, 4, 4), (5, 4, 4)])
def test_one_logit_of_each_pixel_is_refused(shape: tuple[int, ...]) -> None:
    x, y = torch.randn(5, 2, 4, 4, dtype=torch.float64), torch.randint(0, 2, shape)
    with pytest.raises(WrongShape, match=r"take `task\.loss: bce`"):
        run(nn.Conv2d(2, 1, 1).double(), x, y, "mc")


def test_a_head_with_pixels_left_is_refused_by_its_shape() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.AdaptiveAvgPool2d(1)).double()
    with pytest.raises(WrongShape, match="do not fit outputs of shape"):
        run(model, torch.randn(10, 2, 4, 4, dtype=torch.float64), Y, "mc")


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "beyond": (Y + 1, {}, r"a target is 3, but the model has classes 0 to 2; correct the targets, or mark them -100"),
    "below": (Y - 1, {}, "a target is -1, but the model has classes 0 to 2"),
    "whole floats": (Y.double(), {}, r"whole numbers: give them as integers \(`targets\.long\(\)`\)"),
    "floats": (Y + 0.5, {}, "numbers such as 0.5: take `task.type: regression`, or give classes"),
    "nan classes": (Y * torch.nan, {}, "hold NaN or Inf: correct or leave out those examples"),
    "column": (Y[:, None], {}, r"give them as `targets\.reshape\(-1\)`"),
    "several": (functional.one_hot(Y, 3) + functional.one_hot(Y * 0, 3), {}, "take `task.loss: bce`"),
    "negative": (functional.one_hot(Y, 3) * 2.0 - 1 / 3, {}, "must be probabilities of 0 or more that sum to 1"),
    "nan probabilities": (SOFT * torch.nan, {}, "must be probabilities"),
    "too wide": (torch.ones(10, 4) / 4, {}, r"do not fit outputs of shape \(\d+, 3\)"),
    "complex": (Y.to(torch.complex64), {}, "targets must be real numbers"),
    "words": (["cat"] * 10, {}, r"must be a tensor.*of str, first 'cat'\); number the names from 0"),
    "array of words": (np.array(["cat"] * 10), {}, "targets must hold numbers"),
    "masked": (np.ma.masked_array(Y.numpy(), Y.numpy() == 1), {}, "without 3 of its 10 numbers.*`task.ignore_index`"),
    "a mapping": ({"labels": Y}, {}, r"must be a tensor, an array or a list of numbers \(got dict\)"),
    "too few": (Y[:9], {}, r"agree on dimension 0, the examples; got inputs \(10, 6\), targets \(9,\)"),
    "too few in a list": (Y[:9].tolist(), {}, "agree on dimension 0"),
    "nan": (SOFT.where(SOFT[4].max() > SOFT, torch.nan), {"type": "regression"}, r"example \d hold NaN or Inf"),
    "shape": (SOFT[:, :2], {"type": "regression"}, "`mse` needs the same shape"),
    "beyond one": (SOFT * 3, {"loss": "bce"}, "`bce` needs targets between 0 and 1"),
    "words of numbers": (["1.5"] * 10, {"type": "regression"}, "of str, first '1.5'"),
}


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("kind", list(BAD))
def test_targets_that_cannot_be_used_are_refused_with_what_to_do(kind: str) -> None:
    y, task, said = BAD[kind]
    with pytest.raises(WrongShape, match=said) as caught:
        run(net(), X, y, "mc", **task)
    assert caught.value.pointer == "/data"


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (X.numpy(), Y.numpy()),
        (X.numpy(), Y.tolist()),
        (X, tuple(Y.tolist())),
        (read_only(X.clone().numpy()), Y.numpy().astype("uint8")),
        (X.flip(0).contiguous().numpy()[::-1], Y.flip(0).contiguous().numpy()[::-1]),
        (X.numpy().astype(">f8"), Y.numpy().astype(">i8")),
        (np.ma.masked_array(X.numpy()), np.ma.masked_array(Y.numpy(), mask=np.zeros(10, dtype=bool))),
    ],
    ids=["arrays", "list", "tuple", "read-only", "backwards", "big-endian", "nothing masked"],
)
def test_arrays_and_lists_of_numbers_are_tensors(x: Any, y: Any) -> None:
    assert traces(run(net(), x, y)) == traces(run(net(), X, Y))


def test_a_list_of_floats_is_not_rounded() -> None:
    y = SOFT[:, 0]
    assert traces(run(net(1), X, y.tolist(), type="regression")) == traces(run(net(1), X, y, type="regression"))


JAGGED = torch.nested.nested_tensor([X[:3], X[3:]], layout=torch.jagged)
NOT_CUT: dict[str, tuple[Any, str]] = {
    "coo": (X.to_sparse(), r"inputs.* a torch\.sparse_coo one.*`tensor\.to_dense\(\)`"),
    "jagged": (JAGGED, "inputs must be an ordinary tensor .*nested.*; pad its examples to one length"),
    "within": ({"x": X, "edges": X.to_sparse()}, r"inputs\.edges must"),
    "masked": (np.ma.masked_array(X.numpy(), X.numpy() < 0), "without .* of its 60 numbers"),
}


@pytest.mark.parametrize("kind", list(NOT_CUT))
def test_inputs_that_cannot_be_cut_by_example_are_refused_with_what_to_do(kind: str) -> None:
    x, said = NOT_CUT[kind]
    with pytest.raises(WrongShape, match=said) as caught:
        run(net(), x, Y[:2] if kind == "jagged" else Y)
    assert caught.value.pointer == "/data"


def test_a_masked_item_of_a_dataset_is_refused() -> None:
    class Items(Dataset[Any]):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, place: int) -> tuple[Any, int]:
            return np.ma.masked_array(X[place].numpy(), np.arange(6) == place), int(Y[place])

    with pytest.raises(WrongShape, match="the input of item 0 must hold numbers everywhere"):
        measure(net(), Items(), task="classification")


def test_a_pair_of_arrays_is_one_chunk() -> None:
    options: dict[str, Any] = {"task": "classification", "kinds": ("factors",), "collection": {"dtype": "float64"}}
    assert traces(measure(net(), (X.numpy(), Y.numpy()), **options)) == traces(measure(net(), (X, Y), **options))


def test_bytes_are_not_scaled_by_guess() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    images = torch.randint(0, 256, (10, 1, 4, 4), dtype=torch.uint8)
    with pytest.raises(ModelRefused, match=r"as floats \(`images\.float\(\) / 255`\)"):
        run(model, images, Y)


SEQUENCE = torch.randn(6, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
LABELS = torch.randint(0, 5, (6, 5), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize(("axis", "named"), [(1, 1), (2, 2), (2, -1), (1, -2)])
def test_the_class_axis_is_the_one_that_is_named(axis: int, named: int) -> None:
    model = net(5)
    logits = [model(x[None]) if axis == 1 else model(x[None]).mT for x in SEQUENCE]
    losses = [functional.cross_entropy(f, y[None], reduction="sum") for f, y in zip(logits, LABELS, strict=True)]
    exact = {name: total / 30 for name, total in squares(model, losses).items()}
    assert traces(run(model, SEQUENCE, LABELS, class_axis=named)) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("y", [LABELS, None, torch.full((6, 5, 5), 0.2)], ids=["classes", "none", "probabilities"])
def test_an_open_class_axis_is_refused_with_both_readings(y: Tensor | None) -> None:
    said = r"5 classes on dimension 1, .* or 5 classes on dimension 2, .*`task\.class_axis: 1` or `task\.class_axis: 2`"
    with pytest.raises(WrongShape, match=said) as caught:
        run(net(5), SEQUENCE, y, "mc")
    assert caught.value.pointer == "/task/class_axis"


def test_what_is_no_axis_is_refused() -> None:
    with pytest.raises(WrongShape, match="from 1 to 2") as caught:
        run(net(5), SEQUENCE, LABELS, class_axis=3)
    assert caught.value.pointer == "/task/class_axis"
    for task in ({"class_axis": 0}, {"class_axis": 1, "type": "causal_lm"}, {"class_axis": 1, "loss": "model"}):
        with pytest.raises(ValueError, match="class_axis"):
            run(net(5), SEQUENCE, LABELS, **task)


@pytest.mark.part(of=16)
@pytest.mark.parametrize("order", [(4, 5, 6), (6, 5, 4)])
@pytest.mark.parametrize("kinds", [("factors",), ("factors", "spectrum", "natural_gradient")])
def test_a_later_batch_is_read_as_the_first(order: tuple[int, ...], kinds: tuple[str, ...]) -> None:
    """Batches of texts as long as there are classes, among others: as one by one."""
    model = net(5)
    chunks = [(SEQUENCE[:, :1].repeat(1, length, 1) * length, LABELS[:, :1].repeat(1, length)) for length in order]
    losses = [
        functional.cross_entropy(model(x), y, reduction="sum")
        for many, labels in chunks
        for x, y in zip(many, labels, strict=True)
    ]
    exact = {name: total / (6 * sum(order)) for name, total in squares(model, losses).items()}
    spectrum = {"of": ["ggn"], "k": 1, "density": False, "trace": "none"}
    found = measure(
        model, chunks, task="classification", kinds=kinds, params={"spectrum": spectrum},
        collection=Collection(fisher="empirical", dtype="float64", batch_size=4),
    )  # fmt: skip
    assert traces(found) == pytest.approx(exact, rel=1e-12)
    if len(kinds) > 1:
        mean = sum(losses[1:], losses[0]) / (6 * sum(order))
        parts = torch.autograd.grad(mean, list(model.parameters()))
        whole = float(torch.cat([part.flatten() for part in parts]).norm())
        assert found.summary["natural_gradient"].gradient_norm == pytest.approx(whole, rel=1e-12)


def test_a_first_batch_that_says_nothing_is_refused_though_a_later_one_would() -> None:
    chunks = [(SEQUENCE, LABELS), (SEQUENCE[:, :4], LABELS[:, :4])]
    with pytest.raises(WrongShape, match="two ways"):
        measure(net(5), chunks, task="classification", kinds=("factors",))


def test_passes_over_factors_that_were_collected_before_read_their_first_batch_first() -> None:
    """Where a cache has the factors no probe decides; a first batch that is open is refused here, too."""
    chunks = [(SEQUENCE[:, :4], LABELS[:, :4]), (SEQUENCE, LABELS)]
    model, device = net(5).train(), torch.device("cpu")
    job = PassJob.of(workspace(model, chunks, "classification"), device).settled()
    assert job.task.class_axis == 2
    assert model.training
    with pytest.raises(WrongShape, match="two ways"):
        PassJob.of(workspace(model, chunks[::-1], "classification"), device).settled()
    assert model.training


class Known(nn.Module):
    """Knows how many classes it has, but not which dimension they are on."""

    def __init__(self, count: int, turned: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_labels, self.turned = count, turned
        self.head = nn.Linear(6, count).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).mT if self.turned else self.head(x)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("y", [None, "probabilities"])
def test_the_models_own_number_of_classes_decides(turned: bool, y: str | None) -> None:
    model, axis = Known(4, turned), 1 if turned else -1
    labels = None if y is None else torch.full((6, 4, 5) if turned else (6, 5, 4), 0.25, dtype=torch.float64)
    found, named = (run(model, SEQUENCE, labels, "mc", **task) for task in ({}, {"class_axis": axis}))
    assert torch.equal(found.factors["head"].G, named.factors["head"].G)
    with pytest.raises(EngineError, match="two ways"):
        run(Known(5, turned), SEQUENCE, None, "mc")


def test_a_job_on_the_command_line_reads_its_targets_alike(folder: Path, kronoscope: Run) -> None:
    (folder / "sequences_for_kronoscope.py").write_text(
        "import torch\n\n\ndef data():\n    generator = torch.Generator().manual_seed(1)\n"
        "    yield torch.randn(9, 3, 6, generator=generator), torch.randint(0, 3, (9, 3), generator=generator)\n\n\n"
        "def single():\n    return torch.nn.Linear(6, 1)\n"
    )
    sequences = ("--set", "data.factory=sequences_for_kronoscope:data")
    refused = kronoscope("run", "job.yaml", "--output", "no", *sequences)
    assert refused.returncode == 2
    assert "can be read in two ways" in refused.stderr
    assert "task.class_axis" in refused.stderr
    done = kronoscope("run", "job.yaml", "--output", "out", *sequences, "--set", "task.class_axis=-1")
    assert done.returncode == 0, done.stderr
    single = kronoscope("run", "job.yaml", "--output", "one", "--set", "model.factory=sequences_for_kronoscope:single")
    assert single.returncode == 2
    assert "take `task.loss: bce`" in single.stderr


IMAGES = torch.randn(6, 2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


class Pictures(nn.Module):
    """Images (N, C, 4, 5) from images, or with the channels on another dimension."""

    def __init__(self, channels: int, axis: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(2, 3, 3, padding=1, dtype=torch.float64)
        self.last = nn.Conv2d(3, channels, 3, padding=1, dtype=torch.float64)
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))).movedim(1, self.axis)


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("loss", ["mse", "bce", "weighed"])
def test_the_outputs_of_an_image_are_averaged_over_its_channels(loss: str, axis: int) -> None:
    """A term is a pixel with its C channels, whatever the image's width: torch's losses by autograd."""
    channels, weights = 3, torch.tensor(WEIGHTS, dtype=torch.float64)
    model = Pictures(channels, axis)
    y = torch.rand(6, channels, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).round()
    options: dict[str, Any] = {"loss": "mse" if loss == "mse" else "bce"} | ({} if axis == 1 else {"class_axis": axis})
    options |= {"positive_weights": WEIGHTS} if loss == "weighed" else {}

    def one(x: Tensor, t: Tensor) -> Tensor:
        f = model(x[None]).movedim(axis, 1)[0]
        if loss == "mse":
            return (f - t).square().mean(0).sum()
        plain = functional.binary_cross_entropy_with_logits(f, t, reduction="none")
        # a label of weight w is w labels: its square is that of its gradient over √w
        return (
            (plain * (weights.view(-1, 1, 1) * t + 1 - t).sqrt()).mean(0).sum()
            if loss == "weighed"
            else plain.mean(0).sum()
        )

    exact = squares(model, [one(x, t) for x, t in zip(IMAGES, y, strict=True)])
    found = traces(run(model, IMAGES, y.movedim(1, axis), type="regression", **options))
    assert found == pytest.approx({name: total / (6 * 20) for name, total in exact.items()}, rel=1e-12)


def test_the_gauss_newton_matrix_of_images_is_that_of_torchs_mean() -> None:
    """Linear in its weights, so that autograd's Hessian of the mean is the curvature itself."""
    torch.manual_seed(0)
    model = nn.Conv2d(2, 3, 3, padding=1, bias=False, dtype=torch.float64)
    y = torch.randn(6, 3, 4, 5, dtype=torch.float64)
    own = torch.autograd.functional.hessian(  # type: ignore[no-untyped-call]
        lambda w: functional.mse_loss(functional.conv2d(IMAGES, w.view(3, 2, 3, 3), padding=1), y),
        model.weight.detach().flatten(),
    )
    found = run(model, IMAGES, y, "type2", type="regression")
    assert traces(found)["(model)"] == pytest.approx(float(own.trace()), rel=1e-12)
    (factors,) = found.factors.values()
    assert torch.allclose(factors.G, 2 / 3 * torch.eye(3, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_images_of_one_channel_take_targets_without_it() -> None:
    y = torch.randn(6, 4, 5, dtype=torch.float64)
    plain, wide = (traces(run(Pictures(1), IMAGES, each, type="regression")) for each in (y, y[:, None]))
    assert plain == wide


@pytest.mark.parametrize("axis", [None, 1])
def test_outputs_of_three_dimensions_are_sequences_unless_said_otherwise(axis: int | None) -> None:
    model = net(5)
    y = torch.randn(*SEQUENCE.shape[:2], 5, dtype=torch.float64)
    width = y.shape[2 if axis is None else axis]
    losses = [(model(x) - t).square().sum() / width for x, t in zip(SEQUENCE, y, strict=True)]
    terms = y.numel() // width
    exact = {name: total / terms for name, total in squares(model, losses).items()}
    assert traces(run(model, SEQUENCE, y, type="regression", class_axis=axis)) == pytest.approx(exact, rel=1e-12)
