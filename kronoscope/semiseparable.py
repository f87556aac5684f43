"""Semiseparable matrices under the names that scripts know: H ≈ T + U Vᵀ, over ranks, on the host, in mixed precision.

The structures themselves, with solves, determinants and block SSS, are in ``engine.semiseparable``;
docs/semiseparable.md says when each is right.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.distributed.group import join
from engine.errors import UsageError, WrongShape
from engine.memory.offload_store import OffloadStore
from engine.semiseparable.fit import fit_tridiagonal_low_rank
from engine.semiseparable.partition import multiply_columns, scaling, share_columns, shares
from engine.semiseparable.semiseparable_matrix import (
    MatrixRefused,
    default_rank,
    level_ranks,
    read_number,
    read_shift,
    read_whole,
    require_finite,
    require_tensor,
)
from engine.semiseparable.tridiagonal_low_rank import TridiagonalLowRank, formula_bytes
from kronoscope.local_inputs import usable_device

_LEAST_IN_HALF = 2.0**-10
"""Largest entry of a column below which float16 would lose digits of it."""
_EPSILONS = (1e-150, 1e150)
"""Bounds of ε within which ε² and 2/ε² are numbers of float64."""


@dataclass(kw_only=True)
class MemoryOptimizationConfig:
    """Options of a compressed matrix."""

    use_zero: bool = False
    """Whether each rank keeps its share of the columns of U and V."""
    world_size: int = 1
    rank: int = 0
    use_cpu_offload: bool = False
    """Whether U and V stay on the host between products."""
    use_mixed_precision: bool = False
    """Whether U and V are held in ``lowrank_dtype``."""
    lowrank_dtype: torch.dtype = torch.float16
    tridiag_dtype: torch.dtype = torch.float32
    use_hierarchical: bool = False
    num_levels: int = 3

    def __post_init__(self) -> None:
        """Refuse ranks that cannot be, and types that are none of floats."""
        for name in ("world_size", "rank", "num_levels"):
            setattr(self, name, read_whole(getattr(self, name), name))
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise MatrixRefused(f"`rank` must be from 0 to world_size − 1 (got {self.rank} of {self.world_size})")
        if self.use_mixed_precision and self.lowrank_dtype not in (torch.float16, torch.bfloat16):
            raise MatrixRefused(f"`lowrank_dtype` must be torch.float16 or torch.bfloat16 (got {self.lowrank_dtype})")
        if self.tridiag_dtype not in (torch.float32, torch.float64):
            raise MatrixRefused(f"`tridiag_dtype` must be torch.float32 or torch.float64 (got {self.tridiag_dtype})")
        level_ranks(1, self.num_levels)


class _Semiseparable:
    """T + U Vᵀ for matrices of ``n_seq`` rows."""

    def __init__(self, n_seq: int, config: MemoryOptimizationConfig | None = None) -> None:
        self.n_seq, self.config = read_whole(n_seq, "n_seq", 1), _usable(config)
        levels = self.config.num_levels if self.config.use_hierarchical else 1
        self.ranks = level_ranks(self.n_seq, levels)
        self._held: dict[str, Tensor] = {}
        self._report: dict[str, Any] | None = None
        self._store = OffloadStore(0) if self.config.use_cpu_offload else None

    def factorize(self, H: Tensor) -> tuple[Tensor, Any, Any]:
        """Fit T, U and V to a matrix.

        Args:
            H: Shape (n_seq, n_seq).

        Returns:
            T as a dense matrix (n_seq, n_seq); U and V (n_seq, r), or of a hierarchical matrix one of each per level.

        Raises:
            EngineError: If H is not a tensor, not square, of another size, complex, or not finite.
        """
        require_tensor(H, "H")
        if H.ndim == 2 and H.shape[0] == H.shape[1] != self.n_seq:
            raise MatrixRefused(f"`H` must have {self.n_seq} rows, as `n_seq` says (got {H.shape[0]})")
        if H.is_complex():
            raise MatrixRefused(f"`H` must be real (got {H.dtype}); engine.semiseparable fits complex matrices")
        matrix = fit_tridiagonal_low_rank(H, self.ranks).matrix.to(dtype=self.config.tridiag_dtype)
        narrow = self.config.lowrank_dtype
        if self.config.use_mixed_precision:
            matrix = matrix.rounded(narrow, self.config.tridiag_dtype)
        T = torch.diag(matrix.diagonal) + torch.diag(matrix.lower, -1) + torch.diag(matrix.upper, 1)
        U, V = (_narrowed(each, narrow) if matrix.U.dtype == narrow else each for each in matrix.columns())
        self._report, self.ranks = matrix.memory_usage(), matrix.ranks
        self._keep(matrix)
        levels = [list(torch.split(each, list(matrix.ranks), 1)) for each in (U, V)]
        return (T, *levels) if self.config.use_hierarchical else (T, U, V)  # type: ignore[return-value]

    def _keep(self, matrix: TridiagonalLowRank) -> None:
        if self.config.use_zero:
            matrix = share_columns(matrix, self.config.rank, self.config.world_size)
        self._held = matrix.tensors()
        if self._store is not None:
            for name in ("U", "V"):
                self._store.offload(name, self._held.pop(name))

    def matvec(self, x: Tensor) -> Tensor:
        """Return the product with x, (n_seq,) or (n_seq, k).

        Raises:
            UsageError: Before ``factorize``; or where other ranks hold columns, and no process group is initialised.
        """
        if not self._held:
            raise UsageError("a matrix must be fitted before a product; call `factorize(H)` first")
        device = self._held["diagonal"].device
        away = {} if self._store is None else {name: self._store.load(name, device) for name in ("U", "V")}
        matrix = TridiagonalLowRank.read(self._held | away, {})
        if not self.config.use_zero or self.config.world_size == 1:
            return matrix.matvec(x)
        ranks = join(matrix.device)
        if (ranks.size, ranks.rank) != (self.config.world_size, self.config.rank):
            found = "none is initialised" if ranks.size == 1 else f"it is rank {ranks.rank} of {ranks.size}"
            raise UsageError(
                f"this process holds the columns of rank {self.config.rank} of {self.config.world_size}, and a product "
                f"needs the others: initialise torch.distributed with that rank and size ({found}), such as by "
                f"`torchrun --nproc-per-node {self.config.world_size}` and torch.distributed.init_process_group()"
            )
        return multiply_columns(matrix, x, ranks)

    def get_memory_usage(self) -> dict[str, Any]:
        """Return the bytes of the whole matrix, and of what this rank and its device keep; before a fit, by formula."""
        config, whole = self.config, self._report
        narrow = config.lowrank_dtype if config.use_mixed_precision else config.tridiag_dtype
        if whole is None:
            whole = formula_bytes(self.n_seq, self.ranks, narrow, config.tridiag_dtype)
        total, band = whole["total_rank"], whole["tridiagonal_bytes"]
        start, stop = shares(total, config.world_size)[config.rank] if config.use_zero else (0, total)
        own = whole["lowrank_bytes"] * (stop - start) // total
        host = own if config.use_cpu_offload else 0
        return whole | {"rank_bytes": band + own, "device_bytes": band + own - host, "host_bytes": host}


class HierarchicalSemiseparable(_Semiseparable):
    """Several levels of U Vᵀ, of rank ⌈log₂ N⌉ and of the logarithm of the one before: more bytes than one level."""

    def __init__(self, n_seq: int, num_levels: int = 3, config: MemoryOptimizationConfig | None = None) -> None:
        super().__init__(n_seq, replace(_usable(config), use_hierarchical=True, num_levels=num_levels))


class MixedPrecisionSemiseparable(_Semiseparable):
    """U and V in 16 bits, T in float32, products in float32."""

    def __init__(self, n_seq: int, config: MemoryOptimizationConfig | None = None) -> None:
        super().__init__(n_seq, replace(_usable(config), use_mixed_precision=True))


def create_optimized_semiseparable(n_seq: int, config: MemoryOptimizationConfig | None = None) -> _Semiseparable:
    """Return the matrix that a configuration asks for; its options combine.

    Args:
        n_seq: Rows and columns.
        config: The options; None takes the defaults.

    Raises:
        MatrixRefused: If ``n_seq`` is not a whole number of at least 1.
    """
    chosen = _usable(config)
    if chosen.use_hierarchical:
        return HierarchicalSemiseparable(n_seq, chosen.num_levels, chosen)
    return MixedPrecisionSemiseparable(n_seq, chosen) if chosen.use_mixed_precision else _Semiseparable(n_seq, chosen)


class ZeROSemiseparablePartitioner:
    """The split of U and V by columns over ranks; none is left out."""

    def __init__(self, config: MemoryOptimizationConfig) -> None:
        self.config = _usable(config)

    def partition_lowrank_factors(self, U: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's columns of U and V, each (N, k); k is 0 where there are more ranks than columns.

        Args:
            U: Shape (N, r).
            V: Shape (N, r).

        Raises:
            MatrixRefused: If one is not a tensor.
            WrongShape: If the shapes are not equal.
        """
        for name, factor in (("U", U), ("V", V)):
            require_tensor(factor, name)
        if U.ndim != 2 or U.shape != V.shape:
            raise WrongShape(
                f"`U` and `V` must both have shape (N, r) (got {tuple(U.shape)} and {tuple(V.shape)}); "
                "give the two factors of one product U Vᵀ"
            )
        start, stop = shares(U.shape[1], self.config.world_size)[self.config.rank]
        return U[:, start:stop].clone(), V[:, start:stop].clone()

    def compute_memory_savings(self, n_seq: int, rank: int | None = None) -> Mapping[str, Any]:
        """Return bytes without and with the split, and their ratio, of matrices of a rank.

        Args:
            n_seq: Rows and columns, at least 1.
            rank: Columns of U and V; 0 is T alone, None ⌈log₂ N⌉.

        Raises:
            MatrixRefused: If a number is smaller, or not whole.
        """
        size = read_whole(n_seq, "n_seq", 1)
        columns = default_rank(size) if rank is None else read_whole(rank, "rank", 0)
        return scaling(size, columns, self.config.world_size)


class CPUOffloadManager:
    """Tensors on the host by name."""

    def __init__(self, config: MemoryOptimizationConfig | None = None) -> None:
        self.config = _usable(config)
        self._store = OffloadStore(0)

    def offload_to_cpu(self, name: str, tensor: Tensor) -> None:
        """Put a tensor, of any shape and dtype, on the host; ``MatrixRefused`` if it is not one."""
        require_tensor(tensor, "tensor")
        self._store.offload(name, tensor)

    def load_to_gpu(self, name: str, device: torch.device | str | None = None) -> Tensor:
        """Return a tensor on a device; None is the GPU where there is one, else the host.

        Raises:
            UsageError: If nothing has that name, or this machine has no such device.
        """
        chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
        try:
            place = usable_device(chosen)
        except TypeError as error:
            raise MatrixRefused(
                f"`device` must be a torch.device or its name, such as 'cpu' (got {device!r})"
            ) from error
        return self._store.load(name, place)

    def get_statistics(self) -> dict[str, Any]:
        """Return counts, bytes and mean time of the copies."""
        return self._store.statistics()


class BirmanSchwingerCore(nn.Module):
    """The diagonal of the resolvent of H = H₀ + diag(v), H₀ the discrete Laplacian over ε²."""

    def __init__(self, n_seq: int, epsilon: float = 1.0, use_semiseparable: bool = True) -> None:
        super().__init__()
        least, most = _EPSILONS
        self.n_seq, self.epsilon = read_whole(n_seq, "n_seq", 1), read_number(float, epsilon, "epsilon")
        if not least <= self.epsilon <= most:
            raise MatrixRefused(
                f"`epsilon` must be above 0, from {least:g} to {most:g}: H₀ is divided by its square (got {epsilon})"
            )
        self.use_semiseparable = use_semiseparable

    def forward(self, v: Tensor, z: complex | Tensor) -> Tensor:
        """Return diag (H − z)⁻¹ in the shape of v.

        Args:
            v: Shape (N,) or (batch, N), real or complex.
            z: A complex number off the spectrum.

        Returns:
            complex128 where v is of 64 bits a number or part, else complex64.

        Raises:
            MatrixRefused: If v has another length or no rows, or z is not a finite number.
            NonFiniteFactor: If v holds NaN or Inf.
            SingularMatrix: If z is on the spectrum, or nearer to it than rounding.
        """
        require_tensor(v, "v")
        if v.ndim not in (1, 2) or v.shape[-1] != self.n_seq:
            raise MatrixRefused(f"`v` must have shape ({self.n_seq},) or (batch, {self.n_seq}) (got {tuple(v.shape)})")
        if not v.numel():
            raise MatrixRefused(f"`v` must have at least one row (got shape {tuple(v.shape)})")
        shift = read_shift(z)
        wide = v.to(torch.promote_types(v.dtype, torch.float64)).reshape(-1, self.n_seq)
        require_finite(wide.detach(), 0, "`v`")
        found = torch.stack([self._diagonal(each, shift) for each in wide])
        is_double = v.dtype in (torch.float64, torch.complex128)
        return found.reshape(v.shape).to(torch.complex128 if is_double else torch.complex64)

    def _diagonal(self, v: Tensor, z: complex | Tensor) -> Tensor:
        beside = v.new_full((self.n_seq - 1,), -1 / self.epsilon**2)
        none = v.new_zeros(self.n_seq, 0)
        shifted = TridiagonalLowRank(v + 2 / self.epsilon**2, beside, beside, none, none).shifted(z)
        if self.use_semiseparable:
            return shifted.inverse_diagonal().to(torch.complex128)
        dense: Tensor = torch.linalg.inv(shifted.to_dense())
        return dense.diagonal().to(torch.complex128)


def _usable(config: object) -> MemoryOptimizationConfig:
    """Return the options, or their defaults in the place of None."""
    if config is None:
        return MemoryOptimizationConfig()
    if not isinstance(config, MemoryOptimizationConfig):
        raise MatrixRefused(
            f"`config` must be a MemoryOptimizationConfig, or None for the defaults (got {type(config).__name__})"
        )
    return config


def _narrowed(columns: Tensor, dtype: torch.dtype) -> Tensor:
    """Columns in 16 bits; as they are, with a warning, where 16 bits would lose them without their powers of two."""
    largest = columns.abs().amax(0)
    lost = (largest > torch.finfo(dtype).max) | ((largest > 0) & (largest < _LEAST_IN_HALF))
    if dtype == torch.float16 and bool(lost.any()):
        warnings.warn(
            "columns beyond float16 are returned in float32; the matrix holds them with a scale", stacklevel=3
        )
        return columns
    return columns.to(dtype)
