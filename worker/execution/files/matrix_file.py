"""A matrix of the caller's own, in place of collected factors: one layer, whose A is 1 and whose G it is.

It is checked before anything is computed: square, of a floating-point type, finite, and, but for `compression` alone,
symmetric up to what its precision rounds; then symmetric to the last bit, as the mean of the two triangles.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from typing_extensions import override

from engine.artifacts import ReadOnly
from engine.factors.factor_files import factor_file
from engine.factors.factor_index import FORMAT, INDEX
from engine.factors.factor_set import GIVEN_MATRIX, WHOLE_MATRIX
from engine.memory.plan import readable_bytes
from worker.execution.data.byte_count import no_room
from worker.execution.files.open_files import ReadableFile
from worker.execution.files.safetensors_header import ELEMENT_BYTES, TensorEntry, read_header
from worker.execution.refusal import Refusal, names

_TOLERANCES = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
}
"""How far two entries may differ that should be equal, over the largest entry."""
_TYPES = ("F64", "F32", "F16", "BF16")
_ROWS_AT_ONCE = 256


class MatrixFile(ReadOnly):
    """The matrix of a safetensors file, as the engine reads stored factors."""

    _source = "a matrix of the caller's is"

    def __init__(
        self,
        path: ReadableFile,
        tensor: str | None,
        log: Callable[[str, str], None],
        most_bytes: int = 2**62,
        *,
        symmetric: bool = True,
    ) -> None:
        """Read the matrix named ``tensor`` (None: the only one) and check it; ``most_bytes`` of the host are left.

        ``log`` receives ``(level, message)``. Unless ``symmetric``, it is offered as ``WHOLE_MATRIX`` too, as it is.
        """
        header = read_header(path, "/factors/path")
        self.name = _chosen(path, header, tensor)
        square = header[self.name].numbers * ELEMENT_BYTES[header[self.name].dtype]
        needed = square // 2 if symmetric else 7 * square // 2
        what = "a triangle" if symmetric else "rows and working copies"
        if needed > most_bytes:
            taken = f"`{self.name}` of {path.name} has {what} of {readable_bytes(needed)}"
            raise no_room(taken, most_bytes, "/factors/path")
        with safe_open(path, framework="pt") as file:
            matrix: Tensor = file.get_tensor(self.name)
        size = matrix.shape[0]
        _require_finite(path, self.name, matrix)
        asymmetry, allowed = _asymmetry(matrix), _TOLERANCES[matrix.dtype]
        if symmetric and asymmetry > allowed:
            raise _refused(
                path, self.name,
                f"is not symmetric: its triangles differ by {asymmetry:.2g} of the largest entry, and at most "
                f"{allowed:g} is rounding in its precision; give a symmetric matrix, such as (M + Mᵀ)/2",
            )  # fmt: skip
        self._whole = None if symmetric else matrix
        why = f"a matrix of {path.name}"
        if asymmetry > allowed:
            why += "; it is not symmetric, and what this record says of G is of the mean of its triangles"
        elif asymmetry > 0 and symmetric:
            log("info", f"`{self.name}` is asymmetric by {asymmetry:.2g} of its largest entry; its mean is taken")
        self._triangle = _mean_triangle(matrix)
        self._facts = {
            "ordinal": 0, "name": self.name, "module": GIVEN_MATRIX, "form": "block", "why": why,
            "parameters": [], "parameter_count": 0, "in_dim": 1, "out_dim": size, "bias": False, "positions": 1,
            "terms": 1, "calls": 1, "sharing": "expand", "rank_bound_A": None, "rank_bound_G": None,
            "shared_A_with": None,
        }  # fmt: skip

    @override
    def load_json(self, name: str) -> Any:
        if name != INDEX:
            raise FileNotFoundError(name)
        return {
            "format": FORMAT,
            "collection": {},
            "trainable_parameters": 0,
            "examples": 0,
            "updates": 0,
            "passes": 0,
            "layers": [self._facts],
            "declared": [],
        }

    @override
    def load_tensors(self, name: str) -> dict[str, Tensor]:
        if name == WHOLE_MATRIX and self._whole is not None:
            return {"matrix": self._whole}
        if name != factor_file(0):
            raise FileNotFoundError(name)
        return {
            "activation_covariance": torch.ones(1, dtype=self._triangle.dtype),
            "gradient_covariance": self._triangle,
        }


def _chosen(path: ReadableFile, header: Mapping[str, TensorEntry], tensor: str | None) -> str:
    """Name of the matrix; ``Refusal`` if it is missing, unnamed and not the only one, or not square of real numbers."""
    if tensor is None and len(header) > 1:
        raise Refusal(
            f"{path.name} holds {len(header)} tensors; name one of {names(sorted(header))}", pointer="/factors/tensor"
        )
    name = tensor if tensor is not None else next(iter(header))
    if name not in header:
        raise Refusal(
            f"{path.name} holds no tensor of that name; there are {names(sorted(header))}", pointer="/factors/tensor"
        )
    entry = header[name]
    if entry.dtype not in _TYPES:
        raise _refused(path, name, f"is of type {entry.dtype}; take one of {', '.join(_TYPES)}")
    if len(entry.shape) != 2 or entry.shape[0] != entry.shape[1] or entry.numbers == 0:
        raise _refused(path, name, f"has shape {list(entry.shape)}; give a square matrix")
    return name


def _require_finite(path: ReadableFile, name: str, matrix: Tensor) -> None:
    bad = sum(int((~torch.isfinite(rows)).sum()) for rows in torch.split(matrix, _ROWS_AT_ONCE))
    if bad:
        raise _refused(path, name, f"holds NaN or Inf in {bad} of its {matrix.numel()} numbers; give finite ones")


def _asymmetry(matrix: Tensor) -> float:
    """The largest difference between the triangles, over the largest entry."""
    differs = largest = 0.0
    for start in range(0, matrix.shape[0], _ROWS_AT_ONCE):
        rows = matrix[start : start + _ROWS_AT_ONCE].to(torch.float64)
        columns = matrix[:, start : start + _ROWS_AT_ONCE].to(torch.float64)
        differs = max(differs, float((rows - columns.mT).abs().max()))
        largest = max(largest, float(rows.abs().max()))
    return differs / largest if largest > 0 else 0.0


def _mean_triangle(matrix: Tensor) -> Tensor:
    """Upper triangle of ``(M + Mᵀ)/2``, row by row."""
    size = matrix.shape[0]
    triangle = torch.empty(size * (size + 1) // 2, dtype=matrix.dtype)
    start = 0
    for row in range(size):
        right, below = matrix[row, row:], matrix[row:, row]
        # halves first: the sum of two entries near the end of float16 is beyond it, but the least number has no half
        triangle[start : start + size - row] = torch.where(right == below, right, right / 2 + below / 2)
        start += size - row
    return triangle


def _refused(path: ReadableFile, name: str, what: str) -> Refusal:
    return Refusal(f"`{name}` of {path.name} {what}", pointer="/factors/path", code="broken_matrix")
