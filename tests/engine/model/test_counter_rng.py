import pytest
import torch

from engine.model import counter_rng
from engine.model.counter_rng import _mixed, categories, normals, uniforms


def test_published_splitmix64_sequence() -> None:
    # the first outputs of SplitMix64 from state 0, whose state grows by the golden gamma
    gamma = 0x9E3779B97F4A7C15
    states = [(step * gamma) % 2**64 for step in range(3)]
    signed = torch.tensor([s - 2**64 if s >= 2**63 else s for s in states])
    outputs = [value % 2**64 for value in _mixed(signed).tolist()]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_uniforms_are_uniform_and_keyed() -> None:
    index = torch.arange(20_000)
    drawn = uniforms(3, index)
    assert float(drawn.min()) >= 0
    assert float(drawn.max()) < 1
    assert abs(float(drawn.mean()) - 0.5) < 0.01
    assert abs(float(drawn.var()) - 1 / 12) < 0.002
    assert torch.equal(drawn[100:200], uniforms(3, index[100:200]))
    assert abs(float(torch.corrcoef(torch.stack([drawn, uniforms(4, index)]))[0, 1])) < 0.03
    assert abs(float(torch.corrcoef(torch.stack([drawn, uniforms(3, index, 1)]))[0, 1])) < 0.03


def test_normals_have_unit_variance() -> None:
    drawn = normals(0, torch.arange(40_000))
    assert abs(float(drawn.mean())) < 0.02
    assert abs(float(drawn.var()) - 1) < 0.03
    assert abs(float(drawn.pow(4).mean()) - 3) < 0.2


def test_categories_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, -40.0])
    drawn = categories(torch.softmax(logits, 0).expand(50_000, 4), uniforms(1, torch.arange(50_000)))
    share = torch.bincount(drawn, minlength=4) / 50_000
    assert torch.allclose(share, torch.softmax(logits, 0), atol=0.01)
    assert int(share[3]) == 0
    # the ends of the interval stay inside the classes that have a chance
    assert categories(torch.softmax(logits, 0).expand(2, 4), torch.tensor([0.0, 1.0])).tolist() == [0, 2]


def test_categories_are_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    chances, uniform = torch.softmax(torch.randn(3, 5, 300), -1), torch.rand(3, 5, dtype=torch.float64)
    whole = categories(chances, uniform)
    monkeypatch.setattr(counter_rng, "_ROWS_AT_ONCE", 4)
    assert whole.shape == (3, 5)
    assert torch.equal(categories(chances, uniform), whole)


@pytest.mark.parametrize("width", [1, 7, 64, 65, 127, 128, 129, 1000, 8192])
def test_categories_invert_the_cumulative_sum(width: int) -> None:
    torch.manual_seed(width)
    chances = torch.softmax(5 * torch.randn(400, width, dtype=torch.float64), -1)
    uniform = torch.rand(400, dtype=torch.float64)
    cumulative = chances.cumsum(-1)
    plain = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)[:, 0]
    assert torch.equal(categories(chances, uniform), plain)
    # in single precision another class is drawn only where a threshold lies within rounding of a bound
    differs = categories(chances.float(), uniform) != plain
    assert int(differs.sum()) <= 1


def test_categories_of_no_chance_are_never_drawn() -> None:
    # whole blocks and the tail of the last one are impossible
    chances = torch.zeros(1, 200)
    chances[0, [3, 70, 191]] = torch.tensor([0.25, 0.5, 0.25])
    uniform = torch.cat([torch.rand(5000, dtype=torch.float64), torch.tensor([0.0, 0.25, 0.75, 1 - 2**-53])])
    drawn = categories(chances.expand(uniform.numel(), 200), uniform)
    assert set(drawn.tolist()) == {3, 70, 191}
    assert drawn[-4:].tolist() == [3, 70, 191, 191]


@pytest.mark.parametrize("count", [100_000, pytest.param(1_000_000, marks=pytest.mark.nightly)])
def test_labels_of_a_device_are_those_of_float64_sums(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """A device sums by doubled steps; a label differs only where its draw lies within rounding of a boundary."""
    monkeypatch.setattr(counter_rng, "_running_sums", counter_rng._doubled_sums)
    torch.manual_seed(0)
    differing = 0
    for start in range(0, count, 50_000):
        chances = torch.softmax(3 * torch.randn(50_000, 200), -1)
        # one in a thousand lies on a boundary
        uniform = uniforms(7, torch.arange(start, start + 50_000))
        cumulative = chances.to(torch.float64).cumsum(-1)
        uniform[::1000] = (cumulative[:, 99] / cumulative[:, -1])[::1000]
        threshold = uniform[:, None] * cumulative[:, -1:]
        plain = torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp(max=199)
        drawn = categories(chances, uniform)
        apart = (drawn != plain).nonzero()[:, 0]
        differing += len(apart)
        nearest = (cumulative[apart] - threshold[apart]).abs().min(-1).values
        # blocks of 64 are summed in float32, as the chances come
        assert bool((nearest <= 64 * torch.finfo(torch.float32).eps * cumulative[apart, -1]).all())
    assert 0 < differing < count / 500
