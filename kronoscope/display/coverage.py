"""Coverage on a terminal: the measured share of a model, never without the word that it is a part."""

from collections.abc import Sequence

from catalog.analyses.analysis import ExpertTokens, RefusedAnalysis
from catalog.responses.coverage import CoverageView, describe_kinds, name_parameters
from kronoscope.display.printable import printable


def coverage_lines(measured: CoverageView | None) -> list[str]:
    """Return its experts, the forms in which the model was measured, where not all as full blocks, and what was not."""
    lines = [] if measured is None or measured.experts is None else _expert_lines(measured.experts)
    if measured is None or measured.percent("block", "covered") == 100:
        return lines
    lines.append(f"coverage: {describe_kinds(measured)}")
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


def _expert_lines(experts: ExpertTokens) -> list[str]:
    few = f"{experts.fewest:,} to {experts.most:,} tokens each; {experts.starved:,} of them too few for full rank"
    lines = [f"experts: {experts.layers:,} layers were sent {few}"]
    for each in experts.most_starved:
        rank = f"rank of {each.factor} at most {each.rank_bound:,} of {each.columns:,}"
        lines.append(f"  {each.layer}: T = {each.tokens:,}, {rank}; needs {each.times_more:.3g} times as many data")
    more = experts.unreached - len(experts.unreached_layers)
    rest = f" and {more:,} more" if more else ""
    lines += [f"  no token reached: {', '.join(experts.unreached_layers)}{rest}"] if experts.unreached else []
    return [printable(line, lines=False) for line in lines]


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
