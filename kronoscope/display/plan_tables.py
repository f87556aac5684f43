"""A plan as tables: each stage with its bytes and seconds, the largest terms, the smallest budget that would do."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from catalog import PLANNED_STAGES
from catalog.responses.time_estimate import OFF_BY, pace_of, rounded_seconds, written_range, written_seconds
from kronoscope.display.layer_names import shorten_all
from kronoscope.display.numbers import format_bytes, format_number

_LARGEST = 8
_PACES = {
    "measured": "by the speed measured on this machine now",
    "shared": "by the speed measured on this machine now, beside other programs that use its cores",
    "usual": "by a usual speed; stages of less than ten seconds are not shown",
}
_MULTIPLE = 10.0
"""A relative error from here on is shown as a multiple."""


def show_plan(plan: Mapping[str, Any], console: Console) -> None:
    """Print a plan, of a run here or of a service's estimate: stages, largest terms, and lines on what was chosen."""
    console.print(stage_table(plan))
    console.print(largest_terms_table(plan))
    for line in plan_lines(plan):
        console.print(line, markup=False, soft_wrap=True)


def stage_table(plan: Mapping[str, Any]) -> Table:
    """Tabulate the planned stages."""
    table = Table(title="stages", title_justify="left", pad_edge=False, show_edge=False)
    table.add_column("stage", no_wrap=True)
    for heading in ("device", "host", "disk", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    stages = plan["stages"]
    for name in sorted(stages, key=_place):
        stage = stages[name]
        sizes = (format_bytes(stage[f"{place}_bytes"]) for place in ("device", "host", "disk"))
        table.add_row(name, *sizes, _written(stage["seconds"], plan.get("pace")))
    return table


def _written(seconds: float | None, pace: str | None) -> str:
    """Return planned seconds with their bounds; a dash where they are too short to be planned."""
    return _without_unit(written_seconds(seconds, pace_of({"pace": pace})))


def _without_unit(written: str) -> str:
    return written.replace(" s ", " ") or "–"


def measured_stage_table(curve: Mapping[str, Any]) -> Table:
    """Tabulate what each stage took beside what was planned, from a stored memory curve.

    Seconds that were too short to be shown beforehand are shown here: an error is never hidden.
    """
    stages, whole_bounds = curve["stages"], curve.get("seconds_range")
    off_by = OFF_BY[pace_of(curve)]
    table = Table(title="stages: planned, measured, error", title_justify="left", pad_edge=False, show_edge=False)
    table.add_column("stage", no_wrap=True)
    quantities = [("device_bytes", format_bytes, format_bytes), ("host_bytes", format_bytes, format_bytes),
                  ("seconds", lambda each: _without_unit(written_range(each, (each / off_by, each * off_by))),
                   format_number)]  # fmt: skip
    measured_quantities = [each for each in quantities if any(stage.get(f"measured_{each[0]}") for stage in stages)]
    table.add_column("of", no_wrap=True)
    # a row for each quantity: nine columns of figures have no room on a terminal of 100
    for heading in ("planned", "measured", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for stage in stages:
        title = str(stage["stage"])
        for name, show_planned, show in measured_quantities:
            planned, measured, error = (stage.get(f"{part}_{name}") for part in ("planned", "measured", "error"))
            if planned is None and measured is None:
                continue
            planned_text = show_planned(planned) if planned else "–"
            if name == "seconds" and stage["stage"] == "whole job" and whole_bounds:
                # what the start took was known when it was planned
                planned_text = _without_unit(written_range(planned, whole_bounds))
            error_text = "–"
            if error is not None:
                error_text = f"{error:+.0%}" if error < _MULTIPLE else f"×{format_number(round(1 + error))}"
            measured_text = show(measured) if measured else "–"
            table.add_row(title, name.partition("_")[0], planned_text, measured_text, error_text)
            title = ""
    return table


def largest_terms_table(plan: Mapping[str, Any]) -> Table:
    """Tabulate the plan's largest terms."""
    table = Table(title="largest terms", title_justify="left", pad_edge=False, show_edge=False)
    for heading in ("bytes", "where", "stage", "what", "layer", "formula", "source"):
        table.add_column(heading, justify="right" if heading == "bytes" else "left", overflow="fold")
    # a term that lasts for several stages is listed at its first
    distinct: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for term in sorted(plan["terms"], key=lambda term: _place(term["stage"])):
        distinct.setdefault((term["name"], term["place"], term["layer"], term["formula"]), term)
    # layers of one shape have equal terms, one after the other
    alike: dict[tuple[Any, ...], list[str]] = {}
    columns = ("place", "stage", "name", "formula", "source")
    for term in sorted(distinct.values(), key=lambda term: -term["size_bytes"]):
        layers = alike.setdefault((term["size_bytes"], *(term[column] for column in columns)), [])
        layers += [term["layer"]] if term["layer"] else []
    largest = list(alike.items())[:_LARGEST]
    others = [f" and {len(layers) - 1} alike" if len(layers) > 1 else "" for _, layers in largest]
    width = 24 - max(map(len, others), default=0)
    firsts = shorten_all([layers[0] if layers else "" for _, layers in largest], width)
    for ((size, place, stage, name, formula, source), _), first, more in zip(largest, firsts, others, strict=True):
        layer = first + more
        table.add_row(format_bytes(size), place, stage, name, layer, formula, source)
    return table


def _place(stage: str) -> int:
    """Return a stage's position in the job; -1 for terms that are held throughout."""
    return (*PLANNED_STAGES,).index(stage) if stage in PLANNED_STAGES else -1


def plan_lines(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yield a plan's sentences: the choice and its reason, the peaks against their budgets, what was assumed."""
    yield from _part_lines(plan)
    yield plan["why"]
    if plan.get("pace"):
        yield f"seconds: {_PACES[pace_of(plan)]}"
    if whole := written_range(plan.get("seconds"), plan.get("seconds_range")):
        yield f"whole job: {whole}{_passed(plan.get('start_seconds'))}"
    if speeds := plan.get("thread_speeds"):
        tried = ", ".join(f"{format_number(speeds[each] / 1e9)} with {each}" for each in sorted(speeds, key=int))
        yield f"threads: {plan['threads']}, with which products are fastest now ({tried}; 10⁹ operations a second)"
    collection_seconds = (plan.get("stages", {}).get("collection") or {}).get("seconds")
    if collection_seconds and plan.get("self_check_seconds"):
        yield f"self-check: {plan['self_check_seconds'] / collection_seconds:.1%} of the collection's seconds"
    budget, smallest = plan.get("budget") or {}, plan.get("smallest_budget") or {}
    keeping = plan.get("smallest_budget_keeps") or {}
    for place in ("device", "host"):
        peak, allowed, least = plan[f"{place}_peak_bytes"], budget.get(f"{place}_bytes"), smallest.get(f"{place}_bytes")
        if not peak or allowed is None:
            continue
        fits = "fits" if peak <= allowed else "does not fit"
        held = "no limit" if allowed >= 2**60 else format_bytes(allowed)
        would = "" if least is None else f"; the smallest budget that would do is {-(-least // 2**20)}MiB"
        if least is not None and keeping.get(place):
            would += f", with {keeping[place]}"
        yield f"{place}: a peak of {format_bytes(peak)} {fits} into {held}{would}"
    yield from _uncounted_lines(plan)
    if plan.get("unmeasured"):
        yield f"not measured, as no {plan['device']} device is here: " + "; ".join(plan["unmeasured"])
    if plan.get("assumed"):
        yield "assumed, as no weight was read: " + "; ".join(plan["assumed"])


def _passed(start_seconds: float | None) -> str:
    """The part that had passed when the plan was made; empty where it was made of shapes, by no job."""
    return f", of which {rounded_seconds(start_seconds)} s had passed when it was planned" if start_seconds else ""


def _uncounted_lines(plan: Mapping[str, Any]) -> Iterator[str]:
    """The lines on bytes that no budget counts: those of CUDA's context, and of the disk."""
    if plan.get("context_bytes"):
        yield f"context: {format_bytes(plan['context_bytes'])} of the device are CUDA's own, beside budget and peaks"
    if plan["disk_peak_bytes"]:
        yield f"disk: {format_bytes(plan['disk_peak_bytes'])}, which no budget counts"


def _part_lines(plan: Mapping[str, Any]) -> Iterator[str]:
    """The line that says of which part of a job the figures are."""
    rank, piece = plan.get("of_rank"), plan.get("of_piece")
    if rank:
        share = "" if rank["examples"] is None else f", which measures {rank['examples']} of {rank['whole']} examples"
        yield f"figures of one of {rank['world_size']} ranks{share}; their reduction takes further seconds"
    if piece and piece["count"] is None:
        yield (
            "figures of the undivided job: how many pieces there are is decided when it begins, "
            + ("by counting the examples" if piece["whole"] is None else "by the devices that are there")
        )
    elif piece:
        yield (
            f"figures of one of {piece['count']} pieces, with at most {piece['examples']} of {piece['whole']} "
            "examples; from the decomposition on, of the job that merges them all"
        )
