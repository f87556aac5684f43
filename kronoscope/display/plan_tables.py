"""A plan as tables: each stage with its bytes and seconds, the terms that weigh most, and what would do."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from catalog.foreseen_seconds import written_seconds
from catalog.memory import PLANNED_STAGES
from kronoscope.display.tables import number, shortened

_HEAVIEST = 8
_SHORT_SECONDS = 1.0
"""A stage of less, foreseen or found, is mostly what begins everything: its share of error says nothing."""
_MANY = 10.0
"""An error from which it reads as a multiple."""


def show_plan(plan: Mapping[str, Any], console: Console) -> None:
    """Print everything of a plan that a person reads."""
    console.print(stage_table(plan))
    console.print(heaviest_table(plan))
    for line in plan_lines(plan):
        console.print(line, markup=False, soft_wrap=True)


def stage_table(plan: Mapping[str, Any]) -> Table:
    """One row for each stage, in the order in which the job comes to them."""
    table = Table(title="stages", title_justify="left", pad_edge=False, show_edge=False)
    table.add_column("stage", no_wrap=True)
    for heading in ("device", "host", "disk", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    stages = plan["stages"]
    for name in sorted(stages, key=_place):
        stage = stages[name]
        sizes = (readable(stage[f"{place}_bytes"]) for place in ("device", "host", "disk"))
        table.add_row(name, *sizes, _written(stage["seconds"], plan.get("pace")))
    return table


def _written(seconds: float | None, pace: str | None) -> str:
    """Foreseen seconds with their bounds; a dash where they are not worth showing."""
    return written_seconds(seconds, "measured" if pace == "measured" else "usual").replace(" s ", " ") or "–"


def taken_table(stages: Iterable[Mapping[str, Any]], pace: str | None = None) -> Table:
    """Tabulate what each stage took beside what was planned.

    Args:
        stages: Of the memory curve; only places that something was measured in are shown.
        pace: What the seconds were foreseen by.

    Returns:
        A row for each stage; seconds that were not worth showing beforehand have no error afterwards.
    """
    stages = list(stages)
    table = Table(title="stages: planned, measured, error", title_justify="left", pad_edge=False, show_edge=False)
    table.add_column("stage", no_wrap=True)
    quantities = [("device_bytes", readable, readable), ("host_bytes", readable, readable),
                  ("seconds", lambda seconds: _written(seconds, pace), number)]  # fmt: skip
    there = [each for each in quantities if any(stage.get(f"measured_{each[0]}") for stage in stages)]
    for name, _, _ in there:
        for heading in (name.partition("_")[0], "measured", "error"):
            table.add_column(heading, justify="right", no_wrap=True)
    for stage in stages:
        cells = []
        for name, foretell, show in there:
            planned, measured, error = (stage.get(f"{part}_{name}") for part in ("planned", "measured", "error"))
            foretold = foretell(planned) if planned else "–"
            cells += [foretold, show(measured) if measured else "–"]
            short = foretold == "–" or (name == "seconds" and min(planned or 0, measured or 0) < _SHORT_SECONDS)
            cells.append(
                "–" if error is None or short else f"{error:+.0%}" if error < _MANY else f"×{number(round(1 + error))}"
            )
        table.add_row(str(stage["stage"]), *cells)
    return table


def heaviest_table(plan: Mapping[str, Any]) -> Table:
    """The terms that hold most, each with its formula and where the figure comes from."""
    table = Table(title="largest terms", title_justify="left", pad_edge=False, show_edge=False)
    for heading in ("bytes", "where", "stage", "what", "layer", "formula", "source"):
        table.add_column(heading, justify="right" if heading == "bytes" else "left", overflow="fold")
    # what stays from stage to stage is listed where it comes up
    known: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for term in sorted(plan["terms"], key=lambda term: _place(term["stage"])):
        known.setdefault((term["name"], term["place"], term["layer"], term["formula"]), term)
    # layers of one shape take the same, one after the other
    alike: dict[tuple[Any, ...], list[str]] = {}
    columns = ("place", "stage", "name", "formula", "source")
    for term in sorted(known.values(), key=lambda term: -term["size_bytes"]):
        layers = alike.setdefault((term["size_bytes"], *(term[column] for column in columns)), [])
        layers += [term["layer"]] if term["layer"] else []
    for (size, place, stage, name, formula, source), layers in list(alike.items())[:_HEAVIEST]:
        others = f" and {len(layers) - 1} alike" if len(layers) > 1 else ""
        layer = shortened(layers[0], 24 - len(others)) + others if layers else ""
        table.add_row(readable(size), place, stage, name, layer, formula, source)
    return table


def _place(stage: str) -> int:
    """Of a stage, where the job comes to it; what is held throughout comes first."""
    return (*PLANNED_STAGES,).index(stage) if stage in PLANNED_STAGES else -1


def plan_lines(plan: Mapping[str, Any]) -> Iterator[str]:
    """What was chosen and why, what it is held against, and what would do."""
    yield plan["why"]
    if plan.get("pace") == "measured":
        yield "seconds: by the pace that was measured here, with bounds for a job that has the machine to itself"
    elif plan.get("pace"):
        yield "seconds: by a pace that is usual, from ten on: what is shorter is not foreseen"
    whole = (plan.get("stages", {}).get("collection") or {}).get("seconds")
    if whole and plan.get("self_check_seconds"):
        yield f"self-check: {plan['self_check_seconds'] / whole:.1%} of the collection's seconds"
    budget, smallest = plan.get("budget") or {}, plan.get("smallest_budget") or {}
    keeping = plan.get("smallest_budget_keeps") or {}
    for place in ("device", "host"):
        peak, allowed, least = plan[f"{place}_peak_bytes"], budget.get(f"{place}_bytes"), smallest.get(f"{place}_bytes")
        if not peak or allowed is None:
            continue
        fits = "fits" if peak <= allowed else "does not fit"
        held = "no limit" if allowed >= 2**60 else readable(allowed)
        would = "" if least is None else f"; the smallest budget that would do is {-(-least // 2**20)}MiB"
        if least is not None and keeping.get(place):
            would += f", with {keeping[place]}"
        yield f"{place}: a peak of {readable(peak)} {fits} into {held}{would}"
    if plan["disk_peak_bytes"]:
        yield f"disk: {readable(plan['disk_peak_bytes'])}, which no budget counts"
    if plan.get("unmeasured"):
        yield f"not measured, as no {plan['device']} device is here: " + "; ".join(plan["unmeasured"])
    if plan.get("assumed"):
        yield "taken for given, as no weight was read: " + "; ".join(plan["assumed"])


def readable(size_bytes: int) -> str:
    """Bytes as a person reads them; a dash for none."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= size:
            return f"{size_bytes / size:.3g} {unit}"
    return f"{size_bytes} B" if size_bytes else "–"
