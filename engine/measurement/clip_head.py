"""A clipped side that is never made dense: its eigenbasis where that is small, else an operator on what is kept."""

import torch
from torch import Tensor

from catalog.analyses.reconstruction import ReconstructedSide
from engine.factors.clipping.clipped_operator import ClippedOperator
from engine.linalg.damping import clipping_floor
from engine.linalg.linear_operator import Operator
from engine.measurement.clip_factor import Made, in_eigenbasis, not_stabilised
from engine.measurement.layer_measurement import Measured


def clip_structured(layer: Measured, side: Operator, kappa_max: float) -> Made:
    """Clip the G of ``layer`` at ``λ_max / kappa_max`` without making it dense.

    Args:
        layer: The measured layer, whose eigenvalues of G were computed, or counted between bounds.
        side: G, shape (out_dim, out_dim), as it is kept.
        kappa_max: Largest condition number of the result, above 1.

    Returns:
        An eigenbasis of gradient rows, or of a small softmax head; an operator of a wide one, or of a sketch; neither
        where only the diagonal is known.
    """
    if side.has_basis and layer.G.spectrum is not None:
        basis = layer.load_basis("G")
        dtype = torch.float64 if side.storage_dtype == torch.float64 else torch.float32
        return in_eigenbasis(basis.values, basis.vectors, kappa_max, dtype, kind=side.kind)
    values = layer.G.spectrum if layer.G.counted is None else layer.G.counted.values
    if values is None or side.update() is None:
        return not_stabilised(side.size, side.kind, "only its diagonal and trace are kept")
    return _operator(layer, side, values, kappa_max)


def _operator(layer: Measured, side: Operator, values: Tensor, kappa_max: float) -> Made:
    largest = max(float(values[-1]), 0.0)
    kept = ClippedOperator(side=side, floor=clipping_floor(largest, kappa_max), largest=largest)
    below = values[values < kept.floor]
    clipped = int(below.numel()) if layer.clipping_G.clipped is None else layer.clipping_G.clipped
    smallest = max(float(values[0]), kept.floor)
    trace, mass = side.trace(), float((kept.floor - below).sum())
    return Made(
        content=kept,
        side=ReconstructedSide(
            size=side.size,
            kind=side.kind,
            clipped=clipped,
            unclipped=side.size - clipped,
            update="operator",
            why=None,
            precision="float64",
            placement=None,
            rungs=(),
            floor=kept.floor,
            floor_reached=smallest,
            kappa_reached=largest / smallest if smallest > 0 else None,
            found_by="construction",
            trace=trace,
            mass=mass,
            mass_share=mass / trace if trace > 0 else None,
            relative_error=None,
            smallest=None,
            digest=kept.digest(),
        ),
    )
