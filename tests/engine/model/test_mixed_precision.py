"""Sixteen bits in the model, float32 in the sums: what they change, and what a scale must not change."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog.record import FieldError
from catalog.requests.collection import Collection
from catalog.requests.memory import Memory
from engine.analyses.factors import KeptFactors
from engine.collect import collect_or_read
from engine.collection import pass_job
from engine.errors import NonFiniteFactor
from engine.factors.factor_files import read_factors
from engine.factors.factor_set import FactorSet
from engine.factors.kronecker_factors import digest
from engine.linalg.gram import add_gram_, add_grams_
from engine.model import mixed_precision
from engine.model.mixed_precision import LossScale, Precision, choose_precision
from engine.workspace import Workspace
from tests.oracles import relative_error, workspace

CPU = torch.device("cpu")


class Net(nn.Module):
    """A convolution, a norm, a layer used twice, two layers of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(6, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.twice = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.mix(x).transpose(1, 2))
        h = torch.tanh(self.q(h)) * self.k(h)
        return self.head(self.twice(torch.tanh(self.twice(h))).mean(1))


def space(**options: Any) -> Workspace:
    torch.manual_seed(0)
    x, y = torch.randn(12, 6, 10), torch.randint(0, 3, (12,))
    made = workspace(Net(), [(x, y)], "classification", **({"fisher": "empirical", "dtype": "float32"} | options))
    made.options.kinds = ("factors",)
    return made


def digests(whole: FactorSet) -> list[tuple[str, str]]:
    loaded = [whole.load(layer.ordinal) for layer in whole.layers]
    return [(digest(factors.A), digest(factors.G)) for factors in loaded]


@pytest.mark.part(of=32, by=("fisher",))
@pytest.mark.skipif(choose_precision("bf16", CPU).amp == "off", reason="no bfloat16 units")
@pytest.mark.parametrize("fisher", ["empirical", "type2", "forward_only"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("offload", ["off", "on"])
def test_bfloat16_stays_within_its_error(fisher: str, sharing: str, offload: Any) -> None:
    exact = collect_or_read(space(fisher=fisher, sharing=sharing))
    narrow = space(fisher=fisher, sharing=sharing, amp="bf16")
    narrow.options.memory = Memory(offload=offload, micro_batch=3)
    found = collect_or_read(narrow)
    assert (found.amp, found.amp_fallback, found.loss_scale) == ("bf16", None, None)
    errors = []
    for layer in exact.layers:
        left, right = found.load(layer.ordinal), exact.load(layer.ordinal)
        assert left.A.dtype == left.G.dtype == torch.float32
        errors += [relative_error(left.A, right.A), relative_error(left.G, right.G)]
    # eight bits, through five layers there and back
    assert 1e-5 < max(errors) < 2.0**-8 * 10


def test_rows_of_sixteen_bits_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.linalg.gram._CAST", 50)
    rows = torch.randn(3000, 12).to(torch.bfloat16)
    wide = rows.to(torch.float64)
    one = add_gram_(torch.zeros(12, 12), rows)
    several = add_grams_(torch.zeros(3, 4, 4), rows)
    assert relative_error(one.triu().double(), (wide.T @ wide).triu()) < 1e-6
    truth = torch.einsum("pgi,pgj->gij", *[wide.view(-1, 3, 4)] * 2)
    assert relative_error(several.triu().double(), truth.triu()) < 1e-6


def scaled(monkeypatch: pytest.MonkeyPatch, first: float) -> None:
    """Run the scale's arithmetic in float32: directions are multiplied, and gradients divided, as for float16."""

    class Scaled(Precision):
        def loss_scale(self, value: float, steady: int) -> LossScale | None:
            return LossScale(first if steady == 0 else value, steady)

    monkeypatch.setattr(pass_job, "choose_precision", lambda *_: Scaled())


@pytest.mark.part(of=24, by=("scale",))
@pytest.mark.parametrize("options", [
    {"fisher": "empirical"}, {"fisher": "type2"}, {"fisher": "mc", "samples": 3},
    {"fisher": "empirical", "sharing": "reduce"}, {"fisher": "mc", "ema_decay": 0.5},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("scale", [2.0**-9, 2.0**13])
def test_a_scale_is_divided_out_of_everything(
    options: dict[str, Any], scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = digests(collect_or_read(space(**options)))
    scaled(monkeypatch, scale)
    # powers of two are exact: were s² left in, or s for s², no digest would agree
    assert digests(collect_or_read(space(**options))) == truth


def test_a_direction_that_overflows_is_pulled_back_again_with_half_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = digests(collect_or_read(space(fisher="mc", samples=2)))
    scaled(monkeypatch, 2.0**140)
    made: list[LossScale] = []
    lower = LossScale.lower

    def seen(self: LossScale) -> None:
        lower(self)
        made.append(self)

    monkeypatch.setattr(LossScale, "lower", seen)
    found = [digests(collect_or_read(space(fisher="mc", samples=2))) for _ in range(2)]
    assert len(made) > 10
    assert made[0].value < 2.0**128
    assert found == [truth, truth]


def test_gradients_that_are_never_finite_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            # the root's slope at zero is infinite
            return self.layer(x).mul(0).abs().sqrt()

    scaled(monkeypatch, 4.0)
    made = workspace(Broken(), [(torch.randn(3, 2), torch.zeros(3, 2))], "regression", fisher="mc", dtype="float32")
    with pytest.raises(NonFiniteFactor, match=r"collection\.amp"):
        collect_or_read(made)


def test_a_scale_recovers_after_many_steady_directions() -> None:
    scale = LossScale()
    scale.lower()
    for _ in range(mixed_precision._PATIENCE):
        assert scale.value == mixed_precision.FIRST_SCALE / 2
        scale.endure()
    assert (scale.value, scale.steady) == (mixed_precision.FIRST_SCALE, 0)
    for _ in range(20 * mixed_precision._PATIENCE):
        scale.endure()
    assert scale.value == 2.0**15


def test_what_a_device_lacks_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = digests(collect_or_read(space()))
    said: list[str] = []
    made = space(amp="fp16")
    made.ports.log = lambda _, message: said.append(message)
    rows = [row for row in KeptFactors(None, made).rows() if row.status == "covered"]
    assert {(row.record.amp, row.record.amp_fallback) for row in rows} == {("off", "float16 is for CUDA devices")}
    assert [(row.record.digest_A, row.record.digest_G) for row in rows] == truth
    assert any("float16 is for CUDA" in message for message in said)
    again = read_factors(made.ports.artifacts)
    assert (again.amp, again.amp_fallback) == ("off", "float16 is for CUDA devices")
    monkeypatch.setattr(mixed_precision, "_has_bfloat16", lambda _: False)
    assert collect_or_read(space(amp="bf16")).amp_fallback == "this CPU has no bfloat16 units"


def test_amp_narrows_float32_only() -> None:
    with pytest.raises(FieldError, match="dtype: float32"):
        Collection(amp="bf16", dtype="float64")
