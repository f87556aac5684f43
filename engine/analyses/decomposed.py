"""Decomposed factors: each factor's spectrum, and its basis where an analysis asks for it, made once for a job.

What was made is laid aside under the factor's digest, with the rungs it took: in the scratch place,
where another attempt of the job finds it, or in memory where there is none. Values are kept in
float64. Vectors are computed in float64 and kept in float32, which is what products with them need
(an inverse applied through them is good to 1e-6 at a condition of 1e6), unless the factor itself is
kept in float64.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from engine.curvature.eigenbasis import Decomposition, decompose, decompose_structured
from engine.curvature.structured import Structured
from engine.workspace import Workspace

_WORTH_KEEPING = 512
"""Rows from which values alone are laid aside: below, they are computed again as fast as they are read."""


def basis_bytes(size: int, dtype: torch.dtype) -> int:
    """Bytes of a basis (n, n) as it is laid aside, for a factor kept in ``dtype``."""
    return size * size * _stored(dtype).itemsize


def decomposed(
    workspace: Workspace,
    factor: Tensor | Structured,
    *,
    layer: str,
    side: Literal["A", "G"],
    digest: str,
    rank_bound: int | None,
) -> Decomposition | None:
    """The spectrum of one factor, without its vectors; None where none is asked for, or none is to be had.

    Args:
        workspace: Says what is asked for, and where it is laid aside.
        factor: As it is kept; its scale is not in the values.
        layer: For messages, and for the plan's choice.
        side: Which of the layer's two.
        digest: Of the factor.
        rank_bound: Most nonzero eigenvalues there can be, where known.

    Memory:
        As ``eigenbasis.rungs`` says, and the basis once more as it is laid aside.
    """
    need = workspace.decomposition
    if need == "none":
        return None
    name = _name(digest, rank_bound)
    known = _read(workspace, name, vectors=False)
    if known is not None and (known.vectors is not None or need == "values"):
        return replace(known, vectors=None)
    if isinstance(factor, Structured):
        there = factor.to(workspace.device)
        found = decompose_structured(there, layer, need=need, guard=workspace.guard)
        dtype = factor.storage_dtype
    else:
        found = decompose(
            factor.to(workspace.device),
            layer,
            need=need,
            rank_bound=rank_bound,
            guard=workspace.guard,
            begin=_planned_rung(workspace, layer, side),
            what=f"the eigendecomposition of {side}",
        )
        dtype = factor.dtype
    if found is None:
        return None
    _write(workspace, name, found, dtype)
    return replace(found, vectors=None)


def load_basis(workspace: Workspace, digest: str, rank_bound: int | None, scale: float) -> Decomposition:
    """A basis that was laid aside, its values times ``scale``, on the host.

    Memory:
        The basis as it is laid aside.
    """
    found = _read(workspace, _name(digest, rank_bound), vectors=True)
    if found is None:
        raise ValueError("no basis was laid aside: `Workspace.decomposition` asks for none")
    return replace(found, values=found.values * scale)


def _name(digest: str, rank_bound: int | None) -> str:
    """Equal factors with equal zeros have one spectrum."""
    return f"bases/{digest}-{rank_bound}"


def _planned_rung(workspace: Workspace, layer: str, side: Literal["A", "G"]) -> str | None:
    chosen = workspace.chosen if workspace.plan is None else workspace.plan.chosen
    return None if chosen is None else chosen.rung(layer, side)


def _stored(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _write(workspace: Workspace, name: str, found: Decomposition, dtype: torch.dtype) -> None:
    vectors = None if found.vectors is None else found.vectors.to("cpu", _stored(dtype))
    kept = replace(found, vectors=vectors, refused=())
    if workspace.scratch is None:
        if vectors is not None:
            _held(workspace)[name] = kept
        return
    if vectors is None and (not workspace.checkpointed or kept.values.numel() < _WORTH_KEEPING):
        return
    if vectors is not None:
        # LAPACK's columns are rows of the transpose, which are written without a copy
        workspace.scratch.save_tensors(f"{name}.vectors.safetensors", {"rows": vectors.mT}, {})
    workspace.scratch.save_tensors(f"{name}.values.safetensors", {"values": kept.values}, {})
    # last, so that its presence says that all is there
    workspace.scratch.save_json(
        f"{name}.json",
        {
            "conditions": dict(workspace.conditions),
            "vectors": vectors is not None,
            "rungs": list(kept.rungs),
            "residual": kept.residual,
            "precision": kept.precision,
        },
    )


def _read(workspace: Workspace, name: str, *, vectors: bool) -> Decomposition | None:
    """What stands under that name; its vectors are an empty matrix where they are there and not asked for."""
    held = _held(workspace).get(name)
    if held is not None or workspace.scratch is None:
        return held
    try:
        table: Mapping[str, Any] = workspace.scratch.load_json(f"{name}.json")
        # another version of the program may have computed otherwise
        if table["conditions"] != dict(workspace.conditions):
            return None
        basis = None
        if table["vectors"]:
            wanted = f"{name}.vectors.safetensors"
            basis = workspace.scratch.load_tensors(wanted)["rows"].mT if vectors else torch.empty(0, 0)
        values = workspace.scratch.load_tensors(f"{name}.values.safetensors")["values"]
    except FileNotFoundError:
        return None
    return Decomposition(
        values=values,
        vectors=basis,
        rungs=tuple(table["rungs"]),
        residual=table["residual"],
        precision=table["precision"],
    )


def _held(workspace: Workspace) -> dict[str, Decomposition]:
    held: dict[str, Decomposition] = workspace.shared.setdefault("bases", {})
    return held
