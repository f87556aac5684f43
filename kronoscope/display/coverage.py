"""Coverage on a terminal: the measured share of a model, never without the word that it is a part."""

from collections.abc import Sequence

from catalog.analyses.analysis import RefusedAnalysis
from catalog.responses.coverage import CoverageView, percentage


def coverage_lines(measured: CoverageView | None) -> list[str]:
    """Return the warning that a part of the model was not measured."""
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
    """Return the warnings that analyses of a job were refused while others were done."""
    lines = []
    for each in refused or ():
        where = f" ({each.pointer})" if each.pointer else ""
        lines.append(f"warning: `{each.kind}` was refused, and the other analyses are done{where}: {each.message}")
    return lines


def part_note(measured: CoverageView | None, text: str) -> str:
    """Return a text that names the measured share, where a part of the model is missing."""
    return "" if measured is None or measured.message is None else text.format(percentage(measured.measured_share))
