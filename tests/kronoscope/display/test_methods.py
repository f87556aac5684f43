"""What a paper says that each analysis has computed: a phrase for every one of the menu, which follows its options."""

from typing import Any

import pytest

from catalog import ANALYSES
from kronoscope.display.methods import computed

PHRASES: list[tuple[str, dict[str, Any], str]] = [
    ("factors", {}, "the Kronecker factors A and G of each layer"),
    ("capacity", {}, "the spectra, traces and effective dimensions of each layer's block"),
    ("capacity", {"cross_check": "ggn"}, "beside the trace (by 32 random probes) and the largest eigenvalue"),
    ("reconstruction", {}, "the factors A and G of each layer with the eigenvalues below λ_max/κ_max raised"),
    ("reconstruction", {"sides": "G", "route": "eigenbasis"}, "the factor G of each layer"),
    ("reconstruction", {"sides": "G", "route": "eigenbasis"}, "kept as eigenbases to invert through"),
    ("natural_gradient", {}, "the gradient of the mean loss times the power −α of F + λI, with F = G ⊗ A and α = 1"),
    ("natural_gradient", {"power": [1.0, 0.5, -0.25], "damping": "none"}, "F, undamped, with F = G ⊗ A and α = 1, 0.5"),
    ("natural_gradient", {"of": "ekfac", "gradient": {"path": "g"}}, "a given gradient times"),
    ("natural_gradient", {"damping": "factored"}, "of (G + λ_G I) ⊗ (A + λ_A I), with"),
    ("compare_curvature", {}, "the Kullback-Leibler divergence of each layer's factors against a second set"),
    ("spectrum", {}, "eigenvalues at each end, trace and density of K-FAC"),
    ("spectrum", {"of": ["ggn", "hessian"], "k": 3, "end": "largest", "density": False},
     "3 eigenvalues from the largest on and trace of the generalised Gauss-Newton matrix and the Hessian of the loss"),
    ("compression", {}, "the structure with the smallest measured error or the fewest bytes for each factor A and G"),
    ("fewshot_training", {}, "the accuracy of FSCT_cosine on Conv4 over 600 test episodes of 5 classes"),
    ("fewshot_training", {"num_epoch": 2, "optimiser": "SGD"}, "after 2 epochs of 200 episodes with SGD"),
    ("export", {}, "the factors in the format of gptq"),
    ("sensitivity", {"formats": ["int8", "2:4"]}, "of each layer's weights in int8 and 2:4"),
    ("influence", {"of": "ggn"}, "with the damped inverse of the Gauss-Newton matrix, by conjugate gradients"),
    ("influence", {}, "of each training example on the loss of each query, with the damped inverse of K-FAC"),
    ("export", {"format": "mom2"}, "the factors in the format of mom2"),
    ("compression", {"structure": "block_sss", "tolerance": 0.01}, "matrix for each factor A and G within a relative"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "said"), PHRASES)
def test_an_analysis_is_described_by_its_options(kind: str, options: dict[str, Any], said: str) -> None:
    assert said in computed(kind, {kind: options})


def test_every_analysis_of_the_menu_has_a_phrase() -> None:
    assert {kind for kind, _, _ in PHRASES} == set(ANALYSES)
    for kind in ANALYSES:
        assert computed(kind, {}) != kind
    assert computed("of_a_newer_service", {}) == "of_a_newer_service"
