"""The measured share of a model on a terminal: a part is said to be a part."""

from collections.abc import Sequence

from catalog.analysis import RefusedAnalysis
from catalog.coverage import CoverageView, percentage


def coverage_lines(measured: CoverageView | None) -> list[str]:
    """Return the warning that a part of the model was not measured.

    Args:
        measured: The share that was measured; None where no model was given.

    Returns:
        A sentence with the share and the reasons, and a line for each reason with what would cover its parameters; no
        line where nothing is missing.
    """
    if measured is None or measured.message is None:
        return []
    heading = "warning" if measured.status == "partial" else "note"
    remedies = [
        f"  {percentage(each.share)} {each.reason}: {each.remedy or 'see `why` in the records of its layers'}"
        for each in measured.not_measured
    ]
    accept = f"  or accept the part: collection.min_coverage: {int(measured.measured_share * 1000) / 1000:g}"
    return [f"{heading}: {measured.message}", *remedies, *([accept] if measured.status == "partial" else [])]


def refused_lines(refused: Sequence[RefusedAnalysis] | None) -> list[str]:
    """Return the warnings that analyses of a job were refused while others were done.

    Args:
        refused: The analyses; None of a job of an older service.

    Returns:
        A sentence for each, with the layer or field that it was refused for.
    """
    lines = []
    for each in refused or ():
        where = f" ({each.pointer})" if each.pointer else ""
        lines.append(f"warning: `{each.kind}` was refused, and the other analyses are done{where}: {each.message}")
    return lines


def part_note(measured: CoverageView | None, text: str) -> str:
    """Return a text that names the measured share, where a part of the model is missing.

    Args:
        measured: The share; None where no model was given.
        text: The text, with `{}` for the percentage.

    Returns:
        The text; empty where nothing is missing.
    """
    return "" if measured is None or measured.message is None else text.format(percentage(measured.measured_share))
