"""Files of other tools, read back without our code, against sums over single examples in plain autograd."""

import io
import json
import re
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file
from torch import Tensor, nn

from catalog.analyses.export import EXPORT
from engine.analyses.exports.exported_file import ExportRefused
from engine.collection.normalise import leaves_once
from engine.distributed.group import Ranks
from engine.errors import BrokenFactors
from engine.workspace import JobOptions
from kronoscope.local import LayersFactors, Measurement, OptionRefused, measure

FLOAT64 = {"dtype": "float64", "fisher": "empirical", "exact_trace": False, "self_check": "off"}
LAPLACE: dict[str, Any] = {"outputs": 4, "likelihood": "classification"}
A_ONLY = ("gptq", "corda", "mom2")
BOTH = ("laplace", "kronfluence")
Read = dict[str, Any]


def small() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 16, 5), nn.Tanh(), nn.Linear(5, 4, bias=False)
    )
    return net.double(), torch.randn(20, 1, 6, 6).double(), torch.randint(4, (20,))


def collected(**collection: Any) -> Measurement:
    net, images, labels = small()
    return measure(net, [(images, labels)], task="classification", kinds="factors", collection=FLOAT64 | collection)


def sums() -> dict[str, tuple[Tensor, Tensor, int]]:
    """Σ a·aᵀ, Σ g·gᵀ and the count of rows of each layer, g the gradient of the summed loss, by plain hooks."""
    net, images, labels = small()
    entered: dict[str, Tensor] = {}
    left: dict[str, Tensor] = {}
    for name, module in net.named_children():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            module.register_forward_hook(lambda _, inputs, out, name=name: entered.update({name: inputs[0]}) or None)
            module.register_full_backward_hook(lambda _, __, grads, name=name: left.update({name: grads[0]}))
    nn.functional.cross_entropy(net(images.requires_grad_()), labels, reduction="sum").backward()
    made = {}
    for name, module in net.named_children():
        if name not in entered:
            continue
        a, g = entered[name].detach(), left[name]
        if isinstance(module, nn.Conv2d):
            a = nn.functional.unfold(a, 3).transpose(1, 2).reshape(-1, 9)
            g = g.permute(0, 2, 3, 1).reshape(-1, 3)
        if module.bias is not None:
            a = torch.cat([a, torch.ones(len(a), 1).double()], 1)
        made[name] = (a.T @ a, g.T @ g, len(a))
    return made


def written(factors: LayersFactors, named: Any, folder: Path, **options: Any) -> Path:
    path = folder / f"file-{named}"
    rows = factors.export(named, path, **options)
    assert list(rows) == [facts.name for facts in factors.collected.layers]
    return path


def cut(matrix: Tensor, name: str) -> Tensor:
    return matrix if name == "5" else matrix[:-1, :-1]


def test_gptq_has_twice_the_mean_and_the_factor_of_its_inverse(tmp_path: Path) -> None:
    path = written(collected().factors, "gptq", tmp_path)
    tensors = load_file(path)
    assert tensors.keys() == {f"{name}.{each}" for name in "035" for each in ("hessian", "cholesky_inverse")}
    with safe_open(path, "pt") as opened:
        said = opened.metadata()
    layers = json.loads(said["layers"])
    for name, (a, _, count) in sums().items():
        hessian = tensors[f"{name}.hessian"]
        assert torch.allclose(hessian, cut(2 * a / count, name), rtol=1e-12, atol=1e-14)
        upper = tensors[f"{name}.cholesky_inverse"]
        assert upper.dtype == torch.float64
        damped = hessian + layers[name]["damping"] * torch.eye(len(hessian)).double()
        assert torch.allclose(upper @ damped @ upper.T, torch.eye(len(hessian)).double(), atol=1e-9)
        assert layers[name]["count"] == count
    # 48 columns and 20 examples: singular
    assert layers["3"]["damping"] > 0
    assert "condition" not in layers["3"]
    assert "one pass" in said["convention"]
    assert json.loads(said["coverage"])["covered_parameters"] == sum(each.numel() for each in small()[0].parameters())
    assert len(json.loads(said["model_sha256"])) == 64


def test_corda_has_a_by_the_names_of_modules_and_loads_as_weights_alone(tmp_path: Path) -> None:
    loaded = torch.load(written(collected().factors, "corda", tmp_path), weights_only=True)
    said = loaded.pop("kronoscope.")
    assert "scale has no effect" in said["convention"]
    assert loaded.keys() == sums().keys()
    for name, (a, _, count) in sums().items():
        assert torch.allclose(loaded[name], cut(a / count, name), rtol=1e-12, atol=1e-14)
        whole = float((a / count).norm())
        off = float(((a / count).norm() ** 2 - cut(a / count, name).norm() ** 2).clamp(min=0).sqrt())
        told = json.loads(said["layers"])[name].get("cut_share", 0.0)
        assert told == pytest.approx(off / whole, abs=1e-9)


def test_mom2_has_sums_and_counts_as_numpy_reads_them(tmp_path: Path) -> None:
    with zipfile.ZipFile(written(collected().factors, "mom2", tmp_path)) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == ["kronoscope.json", "0.npz", "3.npz", "5.npz"]
        for name, (a, _, count) in sums().items():
            found = np.load(io.BytesIO(archive.read(f"{name}.npz")))  # without pickles
            assert int(found["mom2.count"]) == count
            assert np.allclose(found["mom2.mom2"], cut(a, name).numpy(), rtol=1e-12)
            assert str(found["mom2.constructor"]) == "util.runningstats.SecondMoment()"
            # their loader takes a file whose sample size is the one asked for
            assert int(found["sample_size"]) == 20


def test_kronfluence_has_sums_with_the_bias_last(tmp_path: Path) -> None:
    with zipfile.ZipFile(written(collected().factors, "kronfluence", tmp_path)) as archive:
        files = {name: load(archive.read(name)) for name in archive.namelist() if name.endswith(".safetensors")}
        arguments = json.loads(archive.read("factor_arguments.json"))
    assert arguments == {"strategy": "ekfac", "use_empirical_fisher": True}
    assert files.keys() == {
        f"{each}.safetensors"
        for each in ("activation_covariance", "gradient_covariance", "num_activation_covariance_processed",
                     "num_gradient_covariance_processed")
    }  # fmt: skip
    for name, (a, g, count) in sums().items():
        assert torch.allclose(files["activation_covariance.safetensors"][name], a, rtol=1e-12, atol=1e-13)
        assert torch.allclose(files["gradient_covariance.safetensors"][name], g, rtol=1e-10, atol=1e-13)
        for side in ("activation", "gradient"):
            counted = files[f"num_{side}_covariance_processed.safetensors"][name]
            assert (counted.dtype, counted.tolist()) == (torch.int64, [count])


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_laplace_has_the_sum_over_examples_in_the_order_of_the_parameters(tmp_path: Path, task: str) -> None:
    """The product of one linear layer is the Gauss-Newton matrix itself, where every example has one activation."""
    torch.manual_seed(1)
    net = nn.Linear(4, 3).double()
    inputs = torch.ones(7, 4).double() * torch.tensor([1.0, -2.0, 0.5, 3.0]).double()
    targets = torch.randint(3, (7,)) if task == "classification" else torch.randn(7, 3).double()
    made = measure(
        net, [(inputs, targets)], task=task, kinds="factors", collection={"dtype": "float64", "fisher": "type2"}
    )  # type: ignore[arg-type]
    path = tmp_path / "state.pt"
    made.factors.export("laplace", path, outputs=3, likelihood=task)  # type: ignore[typeddict-item]
    state = torch.load(path, weights_only=True)
    assert state["parameters"] == ["weight", "bias"]
    assert (state["n_data"], state["n_outputs"], state["likelihood"], state["cls_name"]) == (7, 3, task, "KronLaplace")
    assert not state.keys() & {"mean", "loss"}
    # Σ Jᵀ Λ J by autodiff, Λ of laplace-torch: that of the cross entropy, or the identity for half the squared error
    total = torch.zeros(15, 15).double()
    for each in inputs:
        jacobian = torch.cat([torch.kron(torch.eye(3).double(), each[None]), torch.eye(3).double()], 1)
        p = net(each).softmax(0).detach()
        inner = torch.diag(p) - p[:, None] * p if task == "classification" else torch.eye(3).double()
        total += jacobian.T @ inner @ jacobian
    (left, right), (bias,) = state["H"]
    assert torch.allclose(torch.kron(left, right), total[:12, :12], rtol=1e-10, atol=1e-12)
    assert torch.allclose(bias, total[12:, 12:], rtol=1e-10, atol=1e-12)


def test_laplace_knows_parameters_that_are_stored_as_transposes(tmp_path: Path) -> None:
    torch.manual_seed(2)

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 3).double())

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs @ self.weight

    images, labels = torch.randn(9, 5).double(), torch.randint(3, (9,))
    made = measure(Transposed(), [(images, labels)], task="classification", kinds="factors", collection=FLOAT64)
    made.factors.export("laplace", tmp_path / "state.pt", outputs=3, likelihood="classification")
    ((left, right),) = torch.load(tmp_path / "state.pt", weights_only=True)["H"]
    assert (left.shape, right.shape) == ((5, 5), (3, 3))
    assert torch.allclose(left, images.T @ images / 9)


class Language(nn.Module):
    """A table, a normalisation, a linear layer, and a head that is the table."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inner(self.norm(self.table(ids))))  # type: ignore[no-any-return]


def language(*, tied: bool = False, **collection: Any) -> LayersFactors:
    torch.manual_seed(3)
    ids = torch.randint(11, (8, 5))
    options = {"fisher": "empirical", **collection}
    task = {"type": "causal_lm"}
    return measure(Language(tied=tied), [(ids, ids)], task=task, kinds="factors", collection=options).factors


def refusal(factors: LayersFactors, named: Any, folder: Path, **options: Any) -> str:
    with pytest.raises(ExportRefused) as caught:
        factors.export(named, folder / "never", **options)
    assert not list(folder.iterdir())
    return caught.value.message


@pytest.mark.parametrize("named", A_ONLY)
def test_a_layer_that_the_format_cannot_hold_is_refused_by_name(tmp_path: Path, named: str) -> None:
    factors = language()
    said = refusal(factors, named, tmp_path)
    assert said.startswith(f"{named} cannot hold 2 of 4 layers: ")
    assert "`table` has its A as a diagonal alone" in said
    assert "`norm` has no A" in said
    assert '`export.without: ["table", "norm"]`' in said or '`export.without: ["norm", "table"]`' in said
    rows = factors.export(named, tmp_path / "file", without=["table", "no*m"])  # type: ignore[arg-type]
    assert {name for name, row in rows.items() if row.entries} == {"inner", "head"}


@pytest.mark.parametrize("named", [*A_ONLY, "kronfluence"])
def test_head_and_table_in_one_have_no_inputs_of_their_own(tmp_path: Path, named: str) -> None:
    said = refusal(language(tied=True), named, tmp_path, without=["norm"])
    assert "is head and table in one" in said


def test_averages_of_positions_are_no_second_moments_of_them(tmp_path: Path) -> None:
    said = refusal(language(sharing="reduce"), "gptq", tmp_path, without=["table", "norm"])
    assert "`inner` was collected with `sharing: reduce`" in said


def test_a_moving_average_has_no_sums(tmp_path: Path) -> None:
    factors = collected(ema_decay=0.9).factors
    for named in ("mom2", "kronfluence", "laplace"):
        said = refusal(factors, named, tmp_path, **(LAPLACE if named == "laplace" else {}))
        assert "has no counts (a moving average" in said


def test_without_gradients_there_is_no_g(tmp_path: Path) -> None:
    factors = collected(fisher="forward_only").factors
    for named in BOTH:
        said = refusal(factors, named, tmp_path, **(LAPLACE if named == "laplace" else {}))
        assert "`fisher: forward_only`, which has no G" in said
    factors.export("gptq", tmp_path / "file")


def test_laplace_takes_every_parameter_or_says_which_it_lacks(tmp_path: Path) -> None:
    said = refusal(collected().factors, "laplace", tmp_path, without=["3"], **LAPLACE)
    assert "2 have none here, or are left out: `3.weight`, `3.bias`" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"without": ["absent"]}, "`without` holds 'absent', which is the name of no layer"),
        ({"without": ["*"]}, "leaves no layer to export"),
    ],
)
def test_names_that_fit_nothing_or_everything_are_refused(tmp_path: Path, options: Any, said: str) -> None:
    assert said in refusal(collected().factors, "gptq", tmp_path, **options)


@pytest.mark.parametrize(
    ("named", "options", "said"),
    [
        ("onnx", {}, "format"),
        ("laplace", {}, "`laplace` needs classification or regression"),
        ("laplace", {"outputs": 3}, "`laplace` needs classification or regression"),
        ("gptq", {"outputs": 3}, "is an option of `format: laplace`"),
        ("laplace", {**LAPLACE, "outputs": 0}, "is 0; give the number"),
        ("gptq", {"kappa_max": 1.0}, "`kappa_max` is 1.0; take a number above 1"),
        ("gptq", {"kappa_max": "much"}, "kappa_max"),
        ("gptq", {"likelihood": "poisson"}, "likelihood"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path: Path, named: Any, options: Any, said: str) -> None:
    with pytest.raises(OptionRefused, match=re.escape(said)):
        collected().factors.export(named, tmp_path / "never", **options)
    assert not list(tmp_path.iterdir())


def test_inputs_of_zeros_have_nothing_to_solve_with(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2))
    made = measure(net, [(torch.zeros(6, 4), torch.randint(2, (6,)))], task="classification", kinds="factors")
    said = refusal(made.factors, "gptq", tmp_path)
    assert "layer `0` has an A without a positive eigenvalue" in said


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize("named", [*A_ONLY, *BOTH])
def test_the_same_factors_give_the_same_bytes(tmp_path: Path, named: Any) -> None:
    options = LAPLACE if named == "laplace" else {}
    first, second = (written(collected().factors, named, tmp_path, **options).read_bytes() for _ in range(2))
    assert first == second


def test_a_name_that_leads_out_of_a_folder_is_none_of_a_member(tmp_path: Path) -> None:
    net = nn.Sequential()
    net.add_module("/etc/escape", nn.Linear(3, 2))
    net.add_module("C:\\evil", nn.Linear(2, 2))
    made = measure(net, [(torch.randn(4, 3), torch.randint(2, (4,)))], task="classification", kinds="factors")
    made.factors.export("mom2", tmp_path / "file")
    with zipfile.ZipFile(tmp_path / "file") as archive:
        assert archive.namelist() == ["kronoscope.json", "0__etc_escape.npz", "1_C__evil.npz"]


def test_as_an_analysis_it_leaves_the_file_and_a_row_for_each_layer() -> None:
    net, images, labels = small()
    made = measure(net, [(images, labels)], task="classification", kinds=("factors", "export"), collection=FLOAT64,
                   params={"export": {"format": "corda", "without": ["0"]}})  # fmt: skip
    rows = made.of("export")
    assert {name: row.metrics.entries for name, row in rows.items()} == {"0": (), "3": ("3",), "5": ("5",)}
    summary = made.summary["export"]
    assert (summary.format, summary.file, summary.layers, summary.left_out) == ("corda", "export/corda.pt", 2, 1)
    assert summary.total_bytes == 8 * (48**2 + 5**2)
    assert EXPORT.figures[0].note == "{left_out} left out"  # a count, which forms of shares would write as 100 %
    loaded = torch.load(io.BytesIO(made.artifacts._kept["export/corda.pt"]), weights_only=True)  # type: ignore[attr-defined]
    assert loaded.keys() == {"3", "5", "kronoscope."}


def test_laplace_cuts_the_block_of_a_normalisation_between_its_parameters(tmp_path: Path) -> None:
    torch.manual_seed(4)
    net = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2)).double()
    inputs, labels = torch.randn(10, 3).double(), torch.randint(2, (10,))
    made = measure(net, [(inputs, labels)], task="classification", kinds="factors", collection=FLOAT64)
    rows = made.factors.export("laplace", tmp_path / "state.pt", outputs=2, likelihood="classification")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["parameters"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    gradients = []
    for image, label in zip(inputs, labels, strict=True):
        net.zero_grad()
        nn.functional.cross_entropy(net(image[None]), label[None]).backward()
        gradients.append(torch.cat([net[0].weight.grad, net[0].bias.grad]))  # type: ignore[list-item]
    block = sum(torch.outer(each, each) for each in gradients)
    assert isinstance(block, Tensor)
    for place, (found,) in enumerate(state["H"][:2]):
        part = slice(3 * place, 3 * place + 3)
        assert torch.allclose(found, block[part, part], rtol=1e-10, atol=1e-13)
    assert rows["0"].cut_share == pytest.approx(float(2**0.5 * block[:3, 3:].norm() / block.norm()), rel=1e-9)


def test_squared_gradients_of_a_regression_are_those_of_half_the_squared_error(tmp_path: Path) -> None:
    torch.manual_seed(5)
    net = nn.Linear(3, 4, bias=False).double()
    inputs = torch.ones(6, 3).double() * torch.tensor([1.0, 2.0, -1.0]).double()
    targets = torch.randn(6, 4).double()
    made = measure(net, [(inputs, targets)], task="regression", kinds="factors", collection=FLOAT64)
    made.factors.export("laplace", tmp_path / "state.pt", outputs=4, likelihood="regression")
    ((left, right),) = torch.load(tmp_path / "state.pt", weights_only=True)["H"]
    total = torch.zeros(12, 12).double()
    for each, target in zip(inputs, targets, strict=True):
        gradient = torch.outer(net(each).detach() - target, each).flatten()
        total += torch.outer(gradient, gradient)
    assert torch.allclose(torch.kron(left, right), total, rtol=1e-10, atol=1e-12)


def test_another_likelihood_than_that_of_the_loss_is_refused(tmp_path: Path) -> None:
    said = refusal(collected().factors, "laplace", tmp_path, outputs=4, likelihood="regression")
    assert "`likelihood` is `regression`, whose loss is `mse`, and the factors are those of `cross_entropy`" in said


class Sliced(nn.Module):
    """A linear map of which a part is used, a convolution of two groups, and two modules of one weight."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.a = nn.Linear(6, 6, bias=what == "frozen bias")
        self.b = nn.Linear(6, 6, bias=False)
        self.c = nn.Conv1d(6, 6, 1, groups=2, bias=False)
        if what == "shared":
            self.b.weight = self.a.weight
        if what == "frozen bias":
            assert self.a.bias is not None
            self.a.bias.requires_grad_(False)
        if what == "bias alone":
            self.a = nn.Linear(6, 6)
            self.a.weight.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.what == "slice":
            return self.b(nn.functional.pad(nn.functional.linear(inputs, self.a.weight[:4]), (0, 2)))  # type: ignore[no-any-return]
        if self.what == "groups":
            return self.b(self.c(inputs[:, :, None])[:, :, 0])  # type: ignore[no-any-return]
        return self.b(self.a(inputs).tanh())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("what", "named", "said"),
    [
        ("slice", "corda", "is not the whole weight of a module"),
        ("slice", "kronfluence", "is not the whole weight of a module"),
        ("groups", "kronfluence", "is not the whole weight of a module"),
        ("shared", "corda", "is the weight of `a`, `b`, and its A that of all their inputs together"),
        ("shared", "kronfluence", "is the weight of `a`, `b`"),
        ("frozen bias", "kronfluence", "adds a bias that is not trained"),
        ("bias alone", "gptq", "has a bias alone that is trained"),
        ("bias alone", "mom2", "has a bias alone that is trained"),
    ],
)
def test_what_is_no_module_s_own_weight_is_refused_by_its_place(
    tmp_path: Path, what: str, named: str, said: str
) -> None:
    torch.manual_seed(6)
    data = [(torch.randn(9, 6), torch.randint(6, (9,)))]
    made = measure(Sliced(what), data, task="classification", kinds="factors", collection={"fisher": "empirical"})
    assert said in refusal(made.factors, named, tmp_path)


def test_laplace_knows_no_parameter_in_a_third_order(tmp_path: Path) -> None:
    net = nn.Sequential(nn.ConvTranspose2d(2, 3, 2, bias=False), nn.Flatten(), nn.Linear(27, 2))
    data = [(torch.randn(5, 2, 2, 2), torch.randint(2, (5,)))]
    made = measure(net, data, task="classification", kinds="factors", collection={"fisher": "empirical"})
    said = refusal(made.factors, "laplace", tmp_path, outputs=2, likelihood="classification")
    assert "holds `0.weight` in another order than that of a matrix or its transpose" in said


def test_numbers_beyond_the_precision_of_the_file_are_said(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2))
    with torch.no_grad():
        net[0].weight.mul_(1e-25)  # type: ignore[operator]
    # squares of 2.2e38, within float32, and twice that beyond
    made = measure(net, [(torch.full((1, 3), 1.5e19), torch.zeros(1, dtype=torch.int64))], task="classification",
                   kinds="factors", collection={"fisher": "empirical"})  # fmt: skip
    said = refusal(made.factors, "gptq", tmp_path, without=["1"])
    assert "layer `0`: `hessian` holds NaN or Inf in the precision of the file" in said


@pytest.mark.parametrize("kappa", [1e16, 1e30])
def test_a_condition_number_that_float64_does_not_resolve_is_lowered(tmp_path: Path, kappa: float) -> None:
    rows = collected().factors.export("gptq", tmp_path / "file", kappa_max=kappa)
    tensors = load_file(tmp_path / "file")
    # 48 columns of 20 examples
    hessian = tensors["3.hessian"] + (rows["3"].damping or 0) * torch.eye(48).double()
    assert (rows["3"].damping or 0) > 0
    upper = tensors["3.cholesky_inverse"]
    assert torch.isfinite(upper).all()
    assert float((upper @ hessian @ upper.T - torch.eye(48).double()).norm()) < 1


def test_a_damaged_index_is_refused_before_its_numbers_are_used(tmp_path: Path) -> None:
    whole = collected().factors.collected
    first, *others = whole.layers
    assert first.windows is not None
    assert first.sums is not None
    far = replace(first.windows[0], offset=10**9)
    for damaged, said in (
        (replace(first, windows=(far,)), "places its numbers outside of"),
        (replace(first, name=others[0].name), "two layers are named `3`"),
        (replace(first, sums=replace(first.sums, weight_A=1e30)), "has no counts"),
    ):
        factors = LayersFactors(replace(whole, layers=(damaged, *others)))
        with pytest.raises((ExportRefused, BrokenFactors), match=re.escape(said)):
            factors.export("kronfluence", tmp_path / "never")


def test_factors_that_are_read_again_stay_until_then() -> None:
    """On a GPU factors are let go of once they are written, where the collection is all that is asked for."""
    for kinds, leaves in ((("factors",), True), (("factors", "export"), False), (("factors", "compression"), False)):
        made: Any = SimpleNamespace(
            options=JobOptions(kinds=kinds, decomposition="none"),
            inputs=SimpleNamespace(part=None),
            machine=SimpleNamespace(device=torch.device("cuda"), ranks=Ranks.alone()),
        )
        assert leaves_once(made) == leaves
