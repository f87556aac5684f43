"""Factors of a folder or a measurement, layer by layer, as a notebook reads them."""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from catalog.analyses.export import ExportFormat, ExportMetrics, ExportParams
from catalog.brief import count_layers, cut, html_table
from catalog.record_reader import read
from engine.analyses.export import FORMATS
from engine.errors import BrokenFactors
from engine.factors.clipping.clipped_inverse import StabilisedLayers
from engine.factors.dense import Dense
from engine.factors.factor_files import read_factors
from engine.factors.factor_set import Corrected, FactorSet, LayerFacts
from engine.factors.kronecker_factors import Factors
from engine.factors.low_rank import LowRank
from engine.factors.structure_files import INDEX as STRUCTURES
from engine.factors.structure_files import read_structures
from engine.linalg.linear_operator import Operator, Structured
from engine.memory.plan import readable_bytes
from engine.model.state.model_state import host_by_default
from engine.operators.preconditioning import precondition
from engine.semiseparable.semiseparable_matrix import SemiseparableMatrix
from kronoscope.local_artifacts import Folder, folder_of, path_of, unchanged
from kronoscope.local_inputs import OptionRefused, argument, options_record, refusing, usable_device
from kronoscope.local_views import NamedLayers, draw_spectra, make_frame

if TYPE_CHECKING:
    from pandas import DataFrame

_LARGEST_DENSE_BYTES = 2**31
Exported = Mapping[str, ExportMetrics]
"""Entries and figures of each layer in a file, by its name."""


class ExportChoices(TypedDict, total=False):
    """Options of an export."""

    without: Sequence[str]
    """Names of layers to leave out; `*` stands for any characters."""
    kappa_max: float
    """Largest condition number of GPTQ's damped Hessian, 1e6 without it."""
    likelihood: Literal["classification", "regression"]
    """That of laplace-torch, which `laplace` needs."""
    outputs: int
    """The number of the model's outputs for `laplace`; left out, it is the head's, where the factors show it."""


class LayerFactors:
    """A and G of one layer, read when they are asked for."""

    def __init__(
        self, facts: LayerFacts, load: Callable[[], Factors], load_corrected: Callable[[], Corrected] | None = None
    ) -> None:
        self.name = facts.name
        self._facts = facts
        self._load = load
        self._load_corrected = load_corrected

    def __repr__(self) -> str:
        """Return one line: the layer, and the shapes and forms of its factors; none is read."""
        facts = self._facts
        kept = "" if facts.representation_G == "dense" else f" as {facts.representation_G}"
        return (
            f"<LayerFactors of {self.name!r}: {facts.module}, {facts.form}, A {facts.in_dim}×{facts.in_dim}, "
            f"G {facts.out_dim}×{facts.out_dim}{kept}>"
        )

    @cached_property
    @host_by_default()
    def _factors(self) -> Factors:
        return self._load()

    def plot(self, axes: Any = None) -> Any:  # noqa: ANN401 - matplotlib's
        """Draw the eigenvalues of A and G, from the largest, on a scale of logarithms.

        Args:
            axes: Axes of matplotlib; new ones where they are left out.

        Returns:
            The axes.

        Raises:
            ModuleNotFoundError: If axes are left out and matplotlib is not installed.
            MemoryError: As ``G``.
        """
        is_dense = {"A": self.form == "kronecker", "G": self.form != "diagonal_block"}
        sides = {
            "A": torch.linalg.eigvalsh(self.A.double()) if is_dense["A"] else self.diagonal_A,
            "G": torch.linalg.eigvalsh(self.G.double()) if is_dense["G"] else self.diagonal_G,
        }
        return draw_spectra(sides, self.name, axes)

    @property
    def form(self) -> str:
        """`kronecker`, `diagonal` (A is kept as its diagonal), `block` (A = 1) or `diagonal_block` (and G diagonal)."""
        return self._factors.form

    @property
    def A(self) -> Tensor:  # noqa: N802 - the field's own symbol
        """(in_dim, in_dim) dense activation covariance; the bias's row and column last."""
        side = self._factors.side_A
        return side.to_dense(side.wide_dtype)

    @property
    def G(self) -> Tensor:  # noqa: N802 - the field's own symbol
        """(out_dim, out_dim) dense gradient covariance, made at each access where gradient rows stand for it.

        Raises:
            MemoryError: If it is not kept dense, and would take more than 2 GiB.
        """
        side = self._factors.side_G
        if side.kind != "dense" and 4 * side.size**2 > _LARGEST_DENSE_BYTES:
            message = (
                f"layer `{self.name}`: G is kept as `{side.kind}` in {readable_bytes(side.size_bytes)}, and as a "
                f"{side.size}×{side.size} matrix would take {readable_bytes(4 * side.size**2)}; take "
                "`structured_G`, which multiplies, solves and has a diagonal and a trace, or `gradient_rows`"
            )
            raise MemoryError(message)
        return side.to_dense(side.wide_dtype)

    @property
    def structured_G(self) -> Structured | None:  # noqa: N802 - the field's own symbol
        """The representation of G where it is not dense: products, solves, spectrum; None where G is dense."""
        side = self._factors.side_G
        return None if isinstance(side, Dense) else side

    @property
    def gradient_rows(self) -> Tensor | None:
        """(T, out_dim) U with ``G = Uᵀ U``, scales and weight multiplied in; None where none are kept.

        Memory:
            The rows widened to float32, or float64 where they are kept so.
        """
        side = self._factors.G
        return side.scaled() if isinstance(side, LowRank) else None

    @property
    def diagonal_G(self) -> Tensor:  # noqa: N802 - the field's own symbol
        """Diagonal of G, shape (out_dim,), computed without making G dense."""
        side = self._factors.side_G
        return _diagonal(side) if side.kind == "dense" else side.diagonal()

    @property
    def diagonal_A(self) -> Tensor:  # noqa: N802 - the field's own symbol
        """Diagonal of A, shape (in_dim,), computed without making a diagonal A dense."""
        return _diagonal(self._factors.side_A)

    def precondition(self, gradient: Tensor, *, damping_A: float, damping_G: float, of_rows: bool = False) -> Tensor:
        """Return ``(G + damping_G I)⁻¹ V (A + damping_A I)⁻¹``, float64, without making G dense.

        Args:
            gradient: V (out_dim, in_dim), the bias as its last column; with ``of_rows`` C (T, in_dim), of
                ``V = Uᵀ C / √w``, whose digits are kept where damping is tiny.
            damping_A: As `lambda_A` of the layer's record.
            damping_G: As `lambda_G`.
            of_rows: Whether the gradient is given as C, where G is kept as its gradient rows U.

        Raises:
            BiasColumnMismatch: If the shapes disagree; the message names both.
            TypeError: If the gradient is not a tensor of real numbers.
            ValueError: If a damping is not positive, or no gradient rows are kept.
            WrongShape: If C has other rows than are kept.
        """
        with refusing():
            of_A, of_G = read(float, damping_A, "damping_A"), read(float, damping_G, "damping_G")
        return precondition(self._factors, gradient, of_A, of_G, of_rows=of_rows)

    @cached_property
    @host_by_default()
    def _corrected(self) -> Corrected:
        if self._load_corrected is None:
            raise BrokenFactors(
                f"layer `{self.name}` was collected without EK-FAC; take `collection.ekfac: true`", layer=self.name
            )
        return self._load_corrected()

    @property
    def eigenvectors_A(self) -> Tensor | None:  # noqa: N802 - the field's own symbol
        """(in_dim, in_dim) Q_A of EK-FAC, one eigenvector a column; None is the identity, where A is diagonal or 1."""
        return self._corrected.eigenvectors_A

    @property
    def eigenvectors_G(self) -> Tensor | None:  # noqa: N802 - the field's own symbol
        """(out_dim, out_dim) Q_G of EK-FAC; None is the identity, where only a diagonal is kept."""
        return self._corrected.eigenvectors_G

    @property
    def corrected_eigenvalues(self) -> Tensor:
        """(out_dim, in_dim) EK-FAC's eigenvalues: the second moments of the gradients along ``Q_G ⊗ Q_A``."""
        return self._corrected.eigenvalues


def _diagonal(side: Operator) -> Tensor:
    """The diagonal in the precision that the side is shown in."""
    return side.widened() if side.is_diagonal else side.widened().diagonal()


class LayersFactors(NamedLayers[LayerFactors]):
    """Factors by layer name, in the model's order."""

    def __init__(self, collected: FactorSet) -> None:
        self.collected = collected
        correct = collected.load_corrected
        layers = {
            facts.name: LayerFactors(
                facts, partial(collected.load, facts.ordinal), correct and partial(correct, facts.ordinal)
            )
            for facts in collected.layers
        }
        super().__init__("has factors", layers)

    def __repr__(self) -> str:
        """Return one line: how many layers there are, and the first names."""
        return f"<LayersFactors of {count_layers(self)}: {cut(', '.join(map(repr, self)))}>"

    def _repr_html_(self) -> str:
        return html_table(tuple(self._table()), zip(*(map(str, each) for each in self._table().values()), strict=True))

    def export(self, format: ExportFormat, path: str | Path, **options: Unpack[ExportChoices]) -> Exported:  # noqa: A002 - the option's own name
        """Write the factors as a file of another tool.

        Args:
            format: `gptq`, `corda`, `laplace`, `kronfluence` or `mom2`.
            path: The file, which is replaced; of `kronfluence` and `mom2` a zip.
            **options: ``ExportChoices``: layers to leave out, and what single formats take.

        Returns:
            What the file holds of each layer, by its name.

        Raises:
            ExportRefused: If the format cannot hold a layer that is not left out; the message names it.
            OptionRefused: If an option cannot be, or contradicts the format; or no file can be written at the path.
        """
        with refusing():
            file = read(Path, path, "path")
        return export_factors(self.collected, format, file, options)

    def to_frame(self) -> "DataFrame":
        """Return the layers with the shapes of their factors as a table of pandas; no factor is read.

        Raises:
            ModuleNotFoundError: If pandas is not installed.
        """
        return make_frame(self._table())

    def _table(self) -> dict[str, list[Any]]:
        layers = self.collected.layers
        return {
            "layer": [facts.name for facts in layers],
            "module": [facts.module for facts in layers],
            "form": [facts.form for facts in layers],
            "A rows": [facts.in_dim for facts in layers],
            "G rows": [facts.out_dim for facts in layers],
            "G kept as": [facts.representation_G for facts in layers],
            "parameters": [facts.parameter_count for facts in layers],
        }


def load_factors(path: str | Path, *, verify: bool = False) -> LayersFactors:
    """Open the factors in a folder: the one with ``factors.index.json``, a run's output, or its `artifacts`.

    Args:
        path: The folder.
        verify: Whether to read everything now; else each layer is read, and verified, when it is first used.

    Returns:
        The factors by layer name.

    Raises:
        BrokenFactors: If there is no index, a value of it cannot be, or a factor has another digest than it records.
    """
    wanted = argument(bool, verify, "verify")
    found = LayersFactors(read_factors(folder_of(path_of(path))))
    if wanted:
        _read_all(found.collected)
    return found


def load_stabilised(path: str | Path, device: str | torch.device = "cpu") -> StabilisedLayers:
    """Open the eigenbases that a reconstruction with `sides: both` wrote, by that route or of gradients kept as rows.

    Matrices, of `route: rebuild`, are read by ``load_factors``. A single matrix of the caller's is read here for either
    route: it is G, and A is 1.

    Args:
        path: The folder `stabilised`, a run's output, or its `artifacts`.
        device: Where the bases are read to, and products are computed.

    Returns:
        The layers by name, each with products and solves of its stabilised curvature.

    Raises:
        BrokenFactors: If there are none.
        OptionRefused: If this machine has no such device.
    """
    folder, place = path_of(path), usable_device(device)
    for candidate in (folder, folder / "stabilised", folder / "artifacts" / "stabilised"):
        if (candidate / "stabilised.index.json").is_file():
            index = json.loads(unchanged(candidate / "stabilised.index.json").read_bytes())
            files = {int(entry["ordinal"]): entry.get("file") for entry in index["layers"]}
            return StabilisedLayers(index["layers"], partial(_load_ordinal, candidate, files, place))
    raise BrokenFactors(
        f"{folder} holds no stabilised.index.json; give the folder that `reconstruction` wrote with `route: eigenbasis`"
        "; matrices alone are read by `load_factors`"
    )


def load_structures(path: str | Path) -> dict[str, dict[str, SemiseparableMatrix]]:
    """Read the semiseparable matrices that `compression` wrote.

    Args:
        path: The folder `structures`, a run's output, or its `artifacts`.

    Returns:
        Structures by layer name and side, `A` or `G`. Sides that stayed as they are, are not among them.

    Raises:
        BrokenFactors: If there are none, or the index and the files contradict each other.
    """
    given = path_of(path)
    for candidate in (given.resolve().parent if given.name == "structures" else given, given / "artifacts"):
        if (candidate / STRUCTURES).is_file():
            return NamedLayers("is stored as structures", read_structures(Folder(candidate)))
    raise BrokenFactors(f"{given} holds no structures; give the folder that a job with `kind: compression` wrote")


def _load_ordinal(
    folder: Path, files: Mapping[int, str | None], place: torch.device, ordinal: int
) -> dict[str, Tensor]:
    file = unchanged(folder / (files[ordinal] or f"{ordinal}.safetensors"))
    return safetensors.torch.load_file(file, device=str(place))


@host_by_default()
def _read_all(factors: FactorSet) -> None:
    for layer in factors.layers:
        factors.load(layer.ordinal)
        if factors.load_corrected is not None:
            factors.load_corrected(layer.ordinal)


@host_by_default()
def export_factors(collected: FactorSet, named: ExportFormat, path: Path, options: ExportChoices) -> Exported:
    """Write factors as a file of another tool, replaced once it is whole; return what it holds of each layer by name.

    ``ExportRefused`` if the format cannot hold a layer that is not left out, ``OptionRefused`` if an option cannot be,
    or contradicts the format.
    """
    given = {name: value for name, value in options.items() if name != "kappa_max"}
    if isinstance(given.get("without"), (list, tuple)):
        given["without"] = tuple(options["without"])
    params = options_record(ExportParams, {"format": named, **given}, "export")
    with refusing():
        kappa_max = read(float, options.get("kappa_max", 1e6), "kappa_max")
    if not kappa_max > 1:
        raise OptionRefused(f"`kappa_max` is {kappa_max}; take a number above 1, such as 1e6")
    if path.is_dir():
        raise OptionRefused(f"`path` is {str(path)!r}, which is a folder; name a file, such as {str(path / named)!r}")
    if not path.parent.is_dir():
        raise OptionRefused(
            f"`path` is {str(path)!r}, and {str(path.parent)!r} is not a folder; make it, or name another"
        )
    file = FORMATS[params.format](collected, params, kappa_max)
    rows = {facts.name: file.add(facts, collected.load(facts.ordinal)) for facts in collected.layers}
    try:
        part = tempfile.NamedTemporaryFile(dir=path.parent, prefix=".part-", delete=False)  # noqa: SIM115 - closed below
    except OSError as error:
        raise OptionRefused(
            f"`path` is {str(path)!r}, where no file can be made ({error.strerror}); name another"
        ) from error
    with part as written:
        try:
            file.write(written)
            Path(written.name).chmod(0o644)
            Path(written.name).replace(path)
        except BaseException:
            Path(written.name).unlink(missing_ok=True)
            raise
    return rows
