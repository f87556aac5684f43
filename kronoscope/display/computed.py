"""Computed results in words: what a paper says that each analysis of the menu has computed, by its options."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from catalog import ANALYSES
from catalog.record import plain

_CURVATURES = {
    "kfac": "K-FAC",
    "ekfac": "EK-FAC",
    "ggn": "the generalised Gauss-Newton matrix",
    "fisher": "the Fisher information of sampled labels",
    "empirical": "the empirical Fisher",
    "hessian": "the Hessian of the loss",
}


def computed(kind: str, document: Mapping[str, Any]) -> str:
    """Return the noun phrase of what an analysis computes."""
    if kind not in _PHRASES:
        return kind
    params = ANALYSES[kind].params
    defaults = {} if params is None else plain(params())
    return _PHRASES[kind]({**defaults, **(document.get(kind) or {})})


def joined(parts: Sequence[str]) -> str:
    """Return phrases as a list in a sentence."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _factors(options: Mapping[str, Any]) -> str:
    del options
    return "the Kronecker factors A and G of each layer"


def _capacity(options: Mapping[str, Any]) -> str:
    text = "the spectra, traces and effective dimensions of each layer's block"
    if options["cross_check"] is None:
        return text
    return (
        f"{text}, beside the trace (by {options['cross_check_probes']} random probes) and the largest eigenvalue of "
        "the exact Gauss-Newton matrix"
    )


def _reconstruction(options: Mapping[str, Any]) -> str:
    sides = {"both": "the factors A and G", "A": "the factor A", "G": "the factor G"}[options["sides"]]
    route = "rebuilt as matrices" if options["route"] == "rebuild" else "kept as eigenbases to invert through"
    return f"{sides} of each layer with the eigenvalues below λ_max/κ_max raised to it, {route}"


def _natural_gradient(options: Mapping[str, Any]) -> str:
    given = options["power"]
    powers = given if isinstance(given, (list, tuple)) else [given]
    gradient = "the gradient of the mean loss" if options["gradient"] is None else "a given gradient"
    damped = {"exact": "F + λI", "factored": "(G + λ_G I) ⊗ (A + λ_A I)", "none": "F, undamped"}[options["damping"]]
    of = "F = G ⊗ A" if options["of"] == "kfac" else "F of EK-FAC"
    return f"{gradient} times the power −α of {damped}, with {of} and α = {joined([f'{power:g}' for power in powers])}"


def _compare_curvature(options: Mapping[str, Any]) -> str:
    del options
    return (
        "the overlap of leading eigenspaces, the distance and the Kullback-Leibler divergence of each layer's factors "
        "against a second set"
    )


def _spectrum(options: Mapping[str, Any]) -> str:
    of = options["of"]
    named = [_CURVATURES.get(each, each) for each in ([of] if isinstance(of, str) else of)]
    end = {"both": "at each end", "largest": "from the largest on", "smallest": "from the smallest on"}[options["end"]]
    density = ", trace and density" if options["density"] else " and trace"
    count = "" if options["k"] is None else f"{options['k']} "
    return f"{count}eigenvalues {end}{density} of {joined(named)}"


_PHRASES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "factors": _factors,
    "capacity": _capacity,
    "reconstruction": _reconstruction,
    "natural_gradient": _natural_gradient,
    "compare_curvature": _compare_curvature,
    "spectrum": _spectrum,
}
