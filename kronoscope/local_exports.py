"""Exports from a notebook: the factors of a folder or a measurement as a file of another tool."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict

from catalog.analyses.export import ExportFormat, ExportMetrics, ExportParams
from catalog.record_reader import read
from engine.analyses.export import FORMATS
from engine.factors.factor_set import FactorSet
from kronoscope.local_inputs import OptionRefused, options_record, refusing

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
    """The number of the model's outputs, which `laplace` needs."""


def export_factors(collected: FactorSet, named: ExportFormat, path: Path, options: ExportChoices) -> Exported:
    """Write factors as a file of another tool.

    Args:
        path: The file, which is replaced once it is whole.
        options: What else the format takes.

    Returns:
        What the file holds of each layer, by its name.

    Raises:
        ExportRefused: If the format cannot hold a layer that is not left out.
        OptionRefused: If an option cannot be, or contradicts the format.
    """
    given = {name: value for name, value in options.items() if name != "kappa_max"}
    if isinstance(given.get("without"), (list, tuple)):
        given["without"] = tuple(options["without"])
    params = options_record(ExportParams, {"format": named, **given}, "export")
    with refusing():
        kappa_max = read(float, options.get("kappa_max", 1e6), "kappa_max")
    if not kappa_max > 1:
        raise OptionRefused(f"`kappa_max` is {kappa_max}; take a number above 1, such as 1e6")
    file = FORMATS[params.format](collected, params, kappa_max)
    rows = {facts.name: file.add(facts, collected.load(facts.ordinal)) for facts in collected.layers}
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".part-", delete=False) as written:
        try:
            file.write(written)
            Path(written.name).chmod(0o644)
            Path(written.name).replace(path)
        except BaseException:
            Path(written.name).unlink(missing_ok=True)
            raise
    return rows
