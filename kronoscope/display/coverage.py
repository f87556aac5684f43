"""Coverage on a terminal: the measured share of a model, never without the word that it is a part."""

from collections.abc import Sequence

from catalog.analyses.analysis import RefusedAnalysis
from catalog.responses.coverage import CoverageView, describe_kinds, name_parameters
from kronoscope.display.printable import printable


def coverage_lines(measured: CoverageView | None) -> list[str]:
    """Return in which forms the model was measured, where not all of it as full blocks, and what was not measured."""
    if measured is None or measured.percent("block", "covered") == 100:
        return []
    lines = [f"coverage: {describe_kinds(measured)}"]
    for part in measured.parts:
        if part.kind != "not_covered" and part.named:
            named = printable(name_parameters(part.named, part.layers), lines=False)
            lines.append(f"  {part.percent:.1f}% {part.kind}: {named}")
    if measured.message is None:
        return lines
    heading = "warning" if measured.status == "partial" else "note"
    percent = {part.reason: part.percent for part in measured.parts}
    remedies = [
        f"  {percent[each.reason]:.1f}% {each.reason}: {each.remedy or 'see `why` in the records of its layers'}"
        for each in measured.not_measured
    ]
    accept = f"  or accept the part: collection.min_coverage: {int(measured.measured_share * 1000) / 1000:g}"
    message = printable(measured.message, lines=False)
    return [*lines, f"{heading}: {message}", *remedies, *([accept] if measured.status == "partial" else [])]


def refused_lines(refused: Sequence[RefusedAnalysis] | None) -> list[str]:
    """Return the warnings that analyses of a job were refused while others were done."""
    lines = []
    for each in refused or ():
        where = f" ({each.pointer})" if each.pointer else ""
        lines.append(f"warning: `{each.kind}` was refused, and the other analyses are done{where}: {each.message}")
    return lines


def part_note(measured: CoverageView | None, text: str) -> str:
    """Return a text that names the measured share, where a part of the model is missing."""
    return "" if measured is None or measured.message is None else text.format(f"{measured.measured_percent:.1f}%")
