"""The notebook's operator: of a folder as of a measurement, and as SciPy's."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.sparse.linalg import cg
from torch import nn

from engine.errors import BrokenFactors
from engine.factors.factor_files import Kept, write_factors, write_index
from engine.factors.kronecker_factors import digest
from kronoscope.local import Measurement, load_factors, measure, operator
from worker.execution.files.artifact_files import ArtifactFiles


def measured() -> Measurement:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    batch = (torch.randn(20, 6).double(), torch.arange(20) % 3)
    return measure(
        model, [batch], task="classification", kinds=["factors"], collection={"dtype": "float64", "ekfac": True}
    )


def test_scipy_solves_with_it() -> None:
    found = operator(measured(), damping="exact", stabilisation={"damping": 0.1})
    right = torch.ones(found.space.size, dtype=torch.float64)
    solution, failed = cg(found.scipy(), right.numpy(), rtol=1e-12)
    assert not failed
    torch.testing.assert_close(torch.from_numpy(solution), found.solve(right), rtol=1e-8, atol=1e-10)
    columns = found.scipy() @ torch.eye(found.space.size, dtype=torch.float64).numpy()
    torch.testing.assert_close(torch.from_numpy(columns).diagonal(), found.diagonal())


@pytest.mark.parametrize("choice", [{"of": "ekfac"}, {"damping": "factored"}, {"layers": ["2"]}, {}])
def test_choices_reach_the_operator(choice: dict[str, Any]) -> None:
    whole = measured()
    found, same = operator(whole, **choice), operator(whole.factors, **choice)
    right = torch.ones(found.space.size, dtype=torch.float64)
    torch.testing.assert_close(found @ right, same @ right, rtol=0, atol=0)
    assert found.layers == tuple(choice.get("layers", ("0", "2")))
    assert float((operator(whole) @ right - found @ right).norm()) > 0 or not choice


def test_the_damping_is_the_measurements_own_unless_another_is_asked_for() -> None:
    torch.manual_seed(0)
    batch = (torch.randn(20, 6).double(), torch.arange(20) % 3)
    whole = measure(
        nn.Linear(6, 3).double(), [batch], task="classification", kinds=["capacity"],
        collection={"dtype": "float64"}, stabilisation={"damping": 0.5, "damping_mode": "absolute"},
    )  # fmt: skip
    (row,), (factors,) = whole.layers, whole.factors.values()
    lambda_a, lambda_g = row.record.lambda_A, row.record.lambda_G
    eye = torch.eye(21, dtype=torch.float64)
    left, right = (torch.eye(size, dtype=torch.float64) for size in (3, 7))
    undamped, weights = torch.kron(factors.G, factors.A), [row * 7 + column for row in range(3) for column in range(6)]
    order = [*weights, 6, 13, 20]  # a vector has the weight, then the bias
    exact, plain = operator(whole, damping="exact"), operator(whole)
    torch.testing.assert_close(exact @ eye, undamped[order][:, order] + 0.5 * eye)
    torch.testing.assert_close(plain @ eye, undamped[order][:, order])
    assert lambda_a * lambda_g == pytest.approx(0.5)
    factored = torch.kron(factors.G + lambda_g * left, factors.A + lambda_a * right)
    torch.testing.assert_close(operator(whole, damping="factored") @ eye, factored[order][:, order])
    # the caller's own is taken, the defaults of a job too; factors alone have none of their own
    share = float(undamped.trace()) / 21
    for source, given, expected in (
        (whole, {"damping": 0.1}, 0.1 * share), (whole, {}, 1e-4 * share), (whole.factors, None, 1e-4 * share)
    ):  # fmt: skip
        found = operator(source, damping="exact", stabilisation=given)
        torch.testing.assert_close(found @ eye - plain @ eye, expected * eye)


def test_words_that_are_none_are_named() -> None:
    whole = measured()
    for choice, message in (
        ({"of": "fisher"}, r"`of` must be one of kfac, ekfac \(got 'fisher'\)"),
        ({"damping": 0.1}, r"`damping` is 0\.1, .* `damping=.exact.`, .* `stabilisation=\{.damping.: 0\.1, "),
        ({"damping": "full"}, r"`damping` must be one of none, exact, factored \(got .full.\)"),
        ({"resident_bytes": -1}, "0 or more"),
        ({"dampening": "exact"}, "`dampening` must be one of of, damping"),
    ):
        with pytest.raises(ValueError, match=message):
            operator(whole, **choice)  # type: ignore[arg-type] # that is the point


def write(whole: Measurement, folder: Path) -> None:
    files = ArtifactFiles(folder, lambda *_: None)
    held = whole.factors.collected
    kept = {}
    for facts in held.layers:
        factors = held.load(facts.ordinal)
        write_factors(files, facts, factors)
        kept[facts.ordinal] = Kept(
            digest_A=digest(factors.A), digest_G=digest(factors.G), scale_A=1.0, scale_G=1.0, metadata_G={}, ekfac={}
        )
    write_index(files, dataclasses.replace(held, collection=dataclasses.replace(held.collection, ekfac=False)), kept)


def test_stored_factors_give_the_same_operator(tmp_path: Path) -> None:
    whole = measured()
    write(whole, tmp_path)
    found = operator(tmp_path, damping="exact")
    again = operator(load_factors(tmp_path), damping="exact", resident_bytes=0)
    expected = operator(whole, damping="exact")
    right = torch.linspace(-1, 1, found.space.size, dtype=torch.float64)
    torch.testing.assert_close(found.solve(right), expected.solve(right), rtol=0, atol=0)
    torch.testing.assert_close(again.solve(right), expected.solve(right), rtol=0, atol=0)
    assert found.uncovered == ()


def test_a_damaged_folder_is_refused_by_the_layer(tmp_path: Path) -> None:
    write(measured(), tmp_path)
    found = operator(tmp_path)
    second = next(tmp_path.rglob("1.safetensors"))
    content = bytearray(second.read_bytes())
    content[-1] ^= 1
    second.write_bytes(content)
    right = torch.ones(found.space.size, dtype=torch.float64)
    with pytest.raises(BrokenFactors, match=r"layer `2`.*is not what .* records"):
        found @ right
    second.unlink()
    with pytest.raises(BrokenFactors, match=r"layer `2`.*is missing"):
        found @ right
    assert float((found.restricted(["0"]) @ right).norm()) > 0


def test_the_callers_default_device_is_not_the_operators() -> None:
    """Nothing can be computed on the meta device: what followed the default there would be refused."""
    whole = measured()
    damped = operator(whole, damping="exact")
    vector = torch.ones(damped.shape[1], dtype=torch.float64)
    dense = damped @ torch.eye(damped.shape[1], dtype=torch.float64)
    with torch.device("meta"):
        again = operator(whole, damping="exact")
        product, solved, diagonal = again @ vector, again.solve(vector), again.diagonal()
        trace, logdet = again.trace(), again.logdet()
        first = next(iter(whole.factors.values()))
        # the test's own tensors are on the host
        shown = {"A": first.A, "G": first.G, "A's diagonal": first.diagonal_A, "G's diagonal": first.diagonal_G}
    assert {each.device.type for each in (product, solved, diagonal, *shown.values())} == {"cpu"}
    torch.testing.assert_close(product, dense.sum(1))
    torch.testing.assert_close(dense @ solved, vector)
    torch.testing.assert_close(diagonal, dense.diagonal())
    torch.testing.assert_close(trace, float(dense.trace()))
    torch.testing.assert_close(logdet, float(dense.logdet()))
    torch.testing.assert_close(shown["A"].diagonal(), shown["A's diagonal"])
    torch.testing.assert_close(shown["G"].diagonal(), shown["G's diagonal"])
