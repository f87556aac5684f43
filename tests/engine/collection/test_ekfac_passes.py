"""EK-FAC: the eigenvalues re-estimated in the eigenbases of A and G."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from catalog.record import FieldError
from catalog.requests.collection import Collection
from engine.accumulation import ekfac_statistics, example_gradients
from engine.analyses.factors import KeptFactors
from engine.collect import collect_or_read
from engine.errors import BrokenFactors
from engine.factors.factor_set import FactorSet
from engine.memory.budget import MemoryBudget
from engine.memory.plan import LIBRARY_BYTES, Chosen
from engine.planning import job_plan
from engine.workspace import JobResults, Workspace
from kronoscope.local import load_factors
from tests.oracles import MemoryArtifacts, collect, ggn_block, kronecker, relative_error, row_vector, workspace
from worker.execution.files.artifact_files import ArtifactFiles


class Language(nn.Module):
    """Every form: a tied table and head, norms, shared inputs, a map used twice, a bias alone."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.table = nn.Embedding(6, 4), nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.q, self.k = nn.Linear(4, 6), nn.Linear(4, 6)
        self.narrow = Conv1D(4, 6)
        self.twice = nn.Linear(4, 4, bias=False)
        self.frozen = nn.Linear(4, 4)
        self.frozen.weight.requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.table.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.norm(self.table(input_ids) + self.places(torch.arange(input_ids.shape[1])))
        x = self.narrow(torch.tanh(self.q(x)) * torch.tanh(self.k(x)))
        x = self.norm(self.twice(torch.tanh(self.twice(torch.tanh(x)))))
        if attention_mask is not None:
            x = x * attention_mask[..., None]
        return self.head(self.frozen(x + x.cumsum(1).square()))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3, padding=1, stride=2)
        self.grouped = nn.Conv2d(3, 6, 2, groups=3)
        self.line = nn.ConvTranspose1d(6, 4, 2)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.grouped(torch.tanh(self.first(x))))
        return self.head(torch.tanh(self.line(x.flatten(2))).mean(2))


def language(**options: Any) -> Workspace:
    torch.manual_seed(3)
    model = Language().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.7)
    ids, y = torch.randint(0, 5, (7, 6)), torch.randint(0, 5, (7, 6))
    lengths = torch.tensor([6, 3, 5, 6, 1, 2, 6])
    mask = (torch.arange(6) < lengths[:, None]).long()
    chunk = ({"input_ids": ids, "attention_mask": mask}, torch.where(mask > 0, y, -100))
    return workspace(model, [chunk], "masked_lm", **{"ekfac": True, "fisher": "mc"} | options)


def images(**options: Any) -> Workspace:
    torch.manual_seed(4)
    x, y = torch.randn(6, 2, 6, 6, dtype=torch.float64), torch.randint(0, 3, (6,))
    return workspace(Images().double(), [(x, y)], "classification", **{"ekfac": True, "fisher": "mc"} | options)


def law(whole: FactorSet, tolerance: float = 1e-10) -> None:
    """Rotations keep lengths: Σ λ is the exact trace of every layer, and every basis is orthonormal."""
    assert whole.load_corrected is not None
    for layer in whole.layers:
        found = whole.load_corrected(layer.ordinal)
        assert tuple(found.eigenvalues.shape) == (layer.out_dim, layer.in_dim)
        assert float(found.eigenvalues.min()) >= -tolerance
        total = float(found.eigenvalues.sum(dtype=torch.float64))
        assert total == pytest.approx(layer.exact_trace, rel=tolerance), layer.name
        for basis in (found.eigenvectors_A, found.eigenvectors_G):
            if basis is not None:
                eye = torch.eye(basis.shape[0], dtype=basis.dtype)
                assert relative_error(basis.T @ basis, eye) < max(tolerance, 1e-13)


@pytest.mark.part(of=32, by=("make",))
@pytest.mark.parametrize("make", [language, images])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fisher": "type2", "sharing": "reduce"},
        {"fisher": "empirical", "ema_decay": 0.5, "update_freq": 2, "batch_size": 1},
        {"samples": 3, "batch_size": 64},
    ],
)
def test_corrected_eigenvalues_add_up_to_the_exact_trace(make: Any, options: dict[str, Any]) -> None:
    whole = collect_or_read(make(**options))
    law(whole)
    assert whole.passes == 2
    forms = {layer.form for layer in whole.layers}
    assert forms == ({"kronecker", "diagonal", "block"} if make is language else {"kronecker"})


@pytest.mark.parametrize("make", [language, images])
def test_the_law_holds_in_single_precision_and_however_it_is_cut(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ekfac_statistics, "NUMBERS_AT_ONCE", 100)
    monkeypatch.setattr(example_gradients, "NUMBERS_AT_ONCE", 100)
    law(collect_or_read(make(dtype="float32")), 2e-5)
    law(collect_or_read(make()))


def gradients(model: nn.Module, x: Tensor, y: Tensor, name: str) -> Tensor:
    """(N, out, in + 1) of each example, by autograd."""
    found = []
    for example, target in zip(x, y, strict=True):
        loss = nn.functional.cross_entropy(model(example[None]), target[None])
        own = [model.get_parameter(f"{name}.{part}") for part in ("weight", "bias")]
        weight, bias = torch.autograd.grad(loss, own)
        found.append(torch.cat([weight.flatten(1), bias[:, None]], 1))
    return torch.stack(found)


@pytest.mark.parametrize("name", ["first", "head"])
def test_eigenvalues_are_the_moments_of_each_examples_rotated_gradient(name: str) -> None:
    space = images(fisher="empirical")
    assert space.inputs.model is not None
    assert space.inputs.batches is not None
    ((x, y),) = space.inputs.batches()
    whole = collect_or_read(space)
    (layer,) = [layer for layer in whole.layers if layer.name == name]
    assert whole.load_corrected is not None
    found = whole.load_corrected(layer.ordinal)
    assert found.eigenvectors_A is not None
    assert found.eigenvectors_G is not None
    rotated = found.eigenvectors_G.T @ gradients(space.inputs.model, x, y, name) @ found.eigenvectors_A
    assert relative_error(found.eigenvalues, rotated.square().mean(0)) < 1e-10
    factors = whole.load(layer.ordinal)
    for basis, factor in ((found.eigenvectors_A, factors.A), (found.eigenvectors_G, factors.G)):
        diagonal = basis.T @ factor @ basis
        assert relative_error(diagonal, torch.diag(diagonal.diagonal())) < 1e-12


def test_it_is_nearer_to_the_curvature_than_kfac() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(40, 4, dtype=torch.float64), torch.randint(0, 3, (40,))
    whole = collect(model, [(x, y)], "classification", ekfac=True)
    assert whole.load_corrected is not None
    for ordinal, name in enumerate(("0", "2")):
        names = (f"{name}.weight", f"{name}.bias")
        truth = ggn_block(model, x, y, "cross_entropy", names, row_vector(*names))
        found = whole.load_corrected(ordinal)
        assert found.eigenvectors_A is not None
        assert found.eigenvectors_G is not None
        basis = torch.kron(found.eigenvectors_G, found.eigenvectors_A)
        near = basis @ torch.diag(found.eigenvalues.flatten()) @ basis.T
        assert relative_error(near, truth) < relative_error(kronecker(whole, name), truth)
        # the best diagonal in this basis there is
        assert relative_error(torch.diag(basis.T @ truth @ basis), found.eigenvalues.flatten()) < 1e-10


def rows(space: Workspace) -> list[tuple[Any, ...]]:
    space.options.kinds = ("factors",)
    return [
        (row.layer, row.record.digest_A, row.record.digest_G, row.record.digest_ekfac, row.record.digest_eigenvectors_A,
         row.record.digest_eigenvectors_G, row.record.ekfac_trace)
        for row in KeptFactors(None, space).rows()
    ]  # fmt: skip


def test_twice_the_same_and_factors_as_without() -> None:
    first, again, without = rows(language()), rows(language()), rows(language(ekfac=False))
    assert first == again
    assert [row[:3] for row in first] == [row[:3] for row in without]
    assert {row[3:] for row in without} == {(None, None, None, None)}
    assert all(row[3] is not None and row[6] is not None for row in first if row[0] != "unused")


def test_several_passes_change_no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = rows(language())
    made = language()
    made.ports.scratch = MemoryArtifacts()
    monkeypatch.setattr(job_plan, "resident_bytes", lambda: 0)
    names = {layer.name for layer in collect_or_read(language()).layers} | {"unused"}
    made.resume.chosen = Chosen(
        parts=(tuple(sorted(names)),), corrections=(("table", "norm"), tuple(sorted(names - {"table", "norm"})))
    )
    assert rows(made) == truth
    assert collect_or_read(made).passes == 3


def test_bases_that_do_not_fit_together_go_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_plan, "resident_bytes", lambda: 0)

    def wide(**options: Any) -> Workspace:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(12)))
        x, y = torch.randn(8, 96), torch.randn(8, 96)
        return workspace(model, [(x, y)], "regression", fisher="mc", ekfac=True, dtype="float32", **options)

    truth = rows(wide())
    seen = []
    for extra in range(20 * 2**17, 4 * 2**17, -(2**18)):
        made = wide()
        plan: dict[str, Any] = {}
        made.ports.announce_plan, made.ports.scratch = plan.update, MemoryArtifacts()
        made.machine.budget = MemoryBudget(device_bytes=2**62, host_bytes=LIBRARY_BYTES + extra)
        # no budget is refused above one that suffices
        assert rows(made) == truth
        assert plan["host_peak_bytes"] <= LIBRARY_BYTES + extra
        seen.append((len(plan["parts"]), len(plan["corrections"])))
    assert seen[0] == (1, 1)
    assert (1, 2) in seen
    assert max(seen) >= (2, 3)


def test_bare_parameters_need_no_basis() -> None:
    """Their diagonal is the correction; bases of so many numbers would be refused."""

    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(300_000, dtype=torch.float64))
            self.head = nn.Linear(2, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.head((x * self.scale).unflatten(1, (2, -1)).mean(2))

    torch.manual_seed(0)
    x, y = torch.randn(3, 300_000, dtype=torch.float64), torch.randint(0, 3, (3,))
    space = workspace(Marked(), [(x, y)], "classification", fisher="mc", ekfac=True)
    space.machine.budget = MemoryBudget(device_bytes=2**62, host_bytes=job_plan.resident_bytes() + 2**30)
    whole = collect_or_read(space)
    assert [layer.form for layer in whole.layers] == ["diagonal_block", "kronecker"]
    law(whole)


def test_kept_with_the_factors_and_read_again(tmp_path: Path) -> None:
    space = language()
    space.ports.artifacts = ArtifactFiles(tmp_path, lambda *_: None)
    truth = rows(space)
    whole = collect_or_read(space)
    assert whole.load_corrected is not None
    found = load_factors(tmp_path, verify=True)
    for layer in whole.layers:
        kept, own = found[layer.name], whole.load_corrected(layer.ordinal)
        assert torch.equal(kept.corrected_eigenvalues, own.eigenvalues)
        for left, right in (
            (kept.eigenvectors_A, own.eigenvectors_A),
            (kept.eigenvectors_G, own.eigenvectors_G),
        ):
            assert (left is None and right is None) or torch.equal(left, right)  # type: ignore[arg-type]
    index = json.loads((tmp_path / "factors" / "factors.index.json").read_bytes())
    by_name = {entry["name"]: entry for entry in index["layers"]}
    # one input, one basis, one file
    assert by_name["k"]["eigenvectors_A"] == by_name["q"]["eigenvectors_A"]
    again = dataclasses.replace(
        space,
        inputs=dataclasses.replace(space.inputs, model=None, batches=None, task=None, stored=space.ports.artifacts),
        results=JobResults(),
    )
    assert rows(again) == truth
    plain = language(ekfac=False)
    plain.ports.artifacts = ArtifactFiles(tmp_path / "plain", lambda *_: None)
    rows(plain)
    with pytest.raises(BrokenFactors, match="without EK-FAC"):
        _ = load_factors(tmp_path / "plain")["q"].corrected_eigenvalues


def test_forward_only_has_nothing_to_correct_with() -> None:
    with pytest.raises(FieldError, match="needs gradients"):
        Collection(ekfac=True, fisher="forward_only")


@pytest.mark.parametrize(
    ("scale", "dtype", "noticed", "reason"),
    [
        (1e-11, "float32", False, "correction_differs"),
        (1e-9, "float32", True, None),
        (1e-5, "float32", False, None),
        (1e-11, "float64", False, None),
    ],
)
def test_eigenvalues_below_float32_are_noticed_and_what_they_lost_is_not_excused(
    scale: float, dtype: str, noticed: bool, reason: str | None
) -> None:
    """A and G of the first layer are about scale², far above float32's smallest number; their product is not."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 3))
    model[2].weight.data.mul_(scale)
    data = [(scale * torch.randn(13, 5, dtype=torch.float64), torch.randint(3, (13,)))]
    made = workspace(model, data, "classification", dtype=dtype, fisher="type2", ekfac=True, batch_size=5)
    notices, lines = list[str](), list[str]()
    made.ports.notice, made.ports.log = notices.append, lambda _, line: lines.append(line)
    list(KeptFactors(None, made).rows())
    declared = {each.name: each.reason for each in collect_or_read(made).declared}
    assert declared == ({} if reason is None else {"0": reason})
    assert any("layer `0`: the corrected eigenvalues average" in each for each in notices) == noticed
    assert any("its exact trace" in each and "collection.dtype: float64" in each for each in lines) == bool(reason)
