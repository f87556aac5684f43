"""Results as tables that fit 100 columns: one row per layer, one summary line per analysis."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from catalog.responses.coverage import CoverageView, percentage
from kronoscope.client.responses import Layer
from kronoscope.display.comparison import comparison_columns, comparison_notes
from kronoscope.display.coverage import part_note
from kronoscope.display.directions import direction_columns, direction_notes
from kronoscope.display.layer_names import NAME_WIDTH, shorten, shorten_all
from kronoscope.display.numbers import format_number
from kronoscope.display.numbers import read_field as _field

Column = tuple[str, Callable[[Layer], str]]
_WIDTH = 100
_LEAST_NAME = 16
_MOST_LISTED = 12


def _metric(name: str) -> Callable[[Layer], str]:
    return lambda row: format_number(_field(row.metrics, name))


def _factor_shape(row: Layer) -> str:
    if row.record is None or row.record.in_dim is None:
        return "–"
    return f"{row.record.in_dim}×{row.record.out_dim}"


def _share(row: Layer) -> str:
    share = _field(row.metrics, "effective_dimension_share")
    return "–" if share is None else f"{share:.1%}"


def _factor_metric(name: str, show: Callable[[Any], str]) -> Callable[[Layer], str]:
    def shown(row: Layer) -> str:
        side = _field(row.metrics, name)
        return "–" if side is None else show(side)

    return shown


def _clipped(side: Any) -> str:  # noqa: ANN401 - a record, or a mapping of a newer service
    clipped = _field(side, "clipped")
    return "–" if clipped is None else f"{clipped:,}/{_field(side, 'size'):,}"


def _factor_metrics(row: Layer) -> list[Any]:
    return [side for name in ("A", "G") if (side := _field(row.metrics, name)) is not None]


def _floor_kept(row: Layer) -> str:
    """Return the smallest eigenvalue over the floor that was wanted, for the factor with the smaller ratio."""
    wanted = [(_field(side, "floor"), _field(side, "floor_reached")) for side in _factor_metrics(row)]
    shares = [found / floor for floor, found in wanted if floor and found is not None]
    return "–" if not shares else "kept" if min(shares) >= 0.99 else f"{min(shares):.0%}"


def _kappa(row: Layer) -> str:
    """Return the larger condition number of the two after clipping."""
    kappas = [_field(side, "kappa_reached") for side in _factor_metrics(row)]
    return "–" if not kappas or None in kappas else format_number(max(kappas))


def _condition(kappa: float | None, counted: int | None) -> str:
    """Return a condition number: ∞ where the matrix is singular, a dash where its eigenvalues were not computed."""
    return "∞" if kappa is None and counted is not None else format_number(kappa)


def _record_condition(side: str) -> Callable[[Layer], str]:
    """The condition number of a factor; eigenvalues that were computed were counted against the floor too."""
    return lambda row: _condition(_field(row.record, f"kappa_{side}"), _field(row.record, f"clipped_{side}"))


def _placements(row: Layer) -> str:
    places = [
        _field(side, "placement") or ("basis" if _field(side, "update") == "eigenbasis" else _field(side, "update"))
        for side in _factor_metrics(row)
    ]
    return "/".join(dict.fromkeys(str(place) for place in places)) or "–"


def _effective_rank(row: Layer) -> str:
    """Return the effective rank, with a star where it has not converged."""
    shown = format_number(_field(row.metrics, "effective_rank"))
    followed = _field(row.metrics, "convergence") or ()
    late = any(_field(each, "metric") == "effective_rank" and _field(each, "not_converged") for each in followed)
    return f"{shown}*" if late else shown


def _decay(row: Layer) -> str:
    return format_number(_field(_field(row.metrics, "decay"), "exponent"))


def _noise(side: str) -> Callable[[Layer], str]:
    """The standard error of a factor over batches, relative to its norm."""
    return lambda row: format_number(_field(row.record, f"relative_standard_error_{side}"))


_NOISE: tuple[Column, ...] = (("noise A", _noise("A")), ("noise G", _noise("G")))
"""Shown where `collection.batch_variance` was asked for."""


def _of_spectrum(name: str) -> Callable[[Layer], str]:
    """A figure of the layer's spectrum, K-FAC's or EK-FAC's; of the eigenvalues at an end the outermost."""

    def shown(row: Layer) -> str:
        spectrum = _field(row.metrics, "kfac") or _field(row.metrics, "ekfac")
        figure = _field(spectrum, name)
        if isinstance(figure, (tuple, list)):
            return format_number(_field(figure[0], "value") if figure else None)
        return format_number(figure)

    return shown


_COLUMNS: dict[str, tuple[Column, ...]] = {
    "capacity": (
        ("A×G", _factor_shape),
        ("trace", _metric("trace")),
        ("eff. rank", _effective_rank),
        ("eff. dim.", _metric("effective_dimension")),
        ("share", _share),
        ("decay", _decay),
        ("κ", lambda row: _condition(_field(row.metrics, "kappa"), _field(row.metrics, "rank"))),
    ),
    "reconstruction": (
        ("A×G", _factor_shape),
        ("clipped A", _factor_metric("A", _clipped)),
        ("clipped G", _factor_metric("G", _clipped)),
        ("κ", _kappa),
        ("floor", _floor_kept),
        ("where", _placements),
    ),
    "factors": (
        ("A×G", _factor_shape),
        ("form", lambda row: str(_field(row.metrics, "form") or "–")),
        ("trace A", _metric("trace_A")),
        ("trace G", _metric("trace_G")),
        ("exact", _metric("exact_trace")),
        ("ratio", _metric("trace_ratio")),
        ("κ_A", _record_condition("A")),
        ("κ_G", _record_condition("G")),
    ),
    "spectrum": (
        ("A×G", _factor_shape),
        ("trace", _of_spectrum("trace")),
        ("λ_max", _of_spectrum("largest")),
        ("λ_min", _of_spectrum("smallest")),
        ("zeros", _of_spectrum("zeros")),
    ),
}


def layer_table(kind: str, rows: Sequence[Layer], width: int = _WIDTH, measured: CoverageView | None = None) -> Table:
    """Tabulate the covered layers of one analysis."""
    # measured largest first, and shown in the model's order
    covered = sorted((row for row in rows if row.status != "declared"), key=lambda row: row.ordinal)
    columns = _COLUMNS.get(kind) or _generic_columns(covered)
    if kind == "natural_gradient":
        columns = direction_columns(covered, format_number)
    if kind == "compare_curvature":
        # a column for each k that was asked for
        columns = comparison_columns(covered)
    if kind == "factors":
        columns = (*columns, *(each for each in _NOISE if any(each[1](row) != "–" for row in covered)))
    if kind == "capacity" and all(_field(row.metrics, "effective_rank") is None for row in covered):
        # other metrics were asked for: show those
        columns = _generic_columns(covered)
    headings = ["parameters", *(heading for heading, _ in columns)]
    figures = [[format_number(row.parameter_count), *(show(row) for _, show in columns)] for row in covered]
    widths = [max(len(text) for text in column) for column in zip(headings, *figures, strict=True)]
    shown = 0
    names = min(_LEAST_NAME, max((len(row.layer or "(model)") for row in covered), default=0))
    while len(widths) - shown > 1 and sum(widths[shown:]) + 3 * len(widths[shown:]) + names > width:
        shown += 1
    left_out, headings, widths = headings[:shown], headings[shown:], widths[shown:]
    figures = [texts[shown:] for texts in figures]
    left = width - sum(widths) - 3 * len(widths)
    longest = max(_LEAST_NAME, min(NAME_WIDTH, left))
    title = f"{kind}: {_layers(len(covered))}{part_note(measured, ', {} of the model')}"
    table = Table(title=Text(title), title_justify="left", pad_edge=False, show_edge=False)
    table.add_column("layer", no_wrap=True)
    for heading, least in zip(headings, widths, strict=True):
        table.add_column(heading, justify="right", no_wrap=True, min_width=least)
    names_shown = shorten_all([row.layer or "(model)" for row in covered], longest)
    for name, texts in zip(names_shown, figures, strict=True):
        table.add_row(Text(name), *(Text(text) for text in texts))
    if left_out:
        table.caption = f"too narrow for {', '.join(left_out)}"
        table.caption_justify = "left"
    return table


def not_covered_lines(rows: Sequence[Layer]) -> list[str]:
    """Return lines about the layers that are not covered, and those with a status of their own."""
    not_covered = [row for row in rows if row.status == "declared"]
    if len(not_covered) <= _MOST_LISTED:
        lines = [
            f"not covered: {name}, {row.parameter_count or 0:,} parameters, {row.reason}"
            for row, name in zip(not_covered, _names(not_covered), strict=True)
        ]
    else:
        lines = [_line_of_reason(reason, not_covered) for reason in dict.fromkeys(row.reason for row in not_covered)]
    for status in dict.fromkeys(row.status for row in rows if row.status not in ("covered", "declared")):
        concerned = _names([row for row in rows if row.status == status])
        more = f" and {len(concerned) - _MOST_LISTED} more" if len(concerned) > _MOST_LISTED else ""
        lines.append(f"{status}: {', '.join(concerned[:_MOST_LISTED])}{more}")
    return lines


def _names(rows: Sequence[Layer]) -> list[str]:
    return shorten_all([row.layer or "(model)" for row in rows])


def _line_of_reason(reason: str | None, not_covered: Sequence[Layer]) -> str:
    """Return one line for all layers that are not covered for ``reason``."""
    rows = [row for row in not_covered if row.reason == reason]
    first = shorten(rows[0].layer or "(model)")
    more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
    return f"not covered: {sum(row.parameter_count or 0 for row in rows):,} parameters, {reason}: {first}{more}"


def _identity_note(identity: float | None) -> list[str]:
    """Return the error of the gradient identity, where it was checked."""
    return [] if identity is None else [f"gradient identity to {identity:.1g}"]


def summary_line(kind: str, summary: Any, measured: CoverageView | None = None) -> str:  # noqa: ANN401 - each analysis has its own record
    """Return the summary of one analysis as one line."""
    coverage = _field(summary, "coverage")
    parts = [f"{kind}: {_layers(_field(summary, 'layers'))}"]
    # a matrix from a file belongs to no model, so that there is nothing to cover
    if coverage is not None and _field(coverage, "trainable_parameters"):
        share = percentage(_field(coverage, "covered_share"))
        parts.append(f"{share} of {_field(coverage, 'trainable_parameters'):,} trainable parameters covered")
        reasons = sorted((_field(coverage, "reasons") or {}).items(), key=lambda item: -item[1])
        if reasons:
            parts.append("not covered: " + ", ".join(f"{count:,} {reason}" for reason, count in reasons))
        parts += _identity_note(_field(coverage, "gradient_identity"))
    figures = "; ".join(_figures(summary))
    return "; ".join(
        [*parts, *([f"{part_note(measured, 'of the {} that was measured: ')}{figures}"] if figures else [])]
    )


def _figures(summary: Any) -> list[str]:  # noqa: ANN401 - each analysis has its own record
    """Return the figures of the whole model, each with its name."""
    parts = []
    dimension, effective = _field(summary, "dimension"), _field(summary, "effective_dimension")
    if effective is not None:
        parts.append(f"effective dimension {format_number(effective)}" + (f" of {dimension:,}" if dimension else ""))
    clipped = _field(summary, "clipped")
    if clipped is not None:
        kept, limit = _field(summary, "floor_kept"), format_number(_field(summary, "kappa_max"))
        parts.append(f"{clipped:,} of {_field(summary, 'eigenvalues'):,} eigenvalues clipped at κ_max {limit}")
        if kept is not None:
            parts.append(f"floor kept to {percentage(kept)}")
    rank = _field(summary, "effective_rank")
    together = _field(_field(summary, "model"), "effective_rank")
    if rank is not None:
        of_model = "" if together is None else f" summed over layers, {format_number(together)} of the model as a whole"
        parts.append(f"effective rank {format_number(rank)}{of_model}")
    parts += direction_notes(summary, format_number)
    parts += _caveats(_field(summary, "model"))
    parts += comparison_notes(summary)
    late = (_field(summary, "not_converged") or {}).get("effective_rank")
    if late:
        parts.append(f"effective rank not converged in {_layers(late)} (*): take more examples")
    optional = {"token_importance": _token_note, "cross_check": _exact_comparison}
    return parts + [note(part) for name, note in optional.items() if (part := _field(summary, name)) is not None]


def _caveats(model: Any) -> list[str]:  # noqa: ANN401 - a record, or what a service sends in its place
    """Return notes on layers with eigenvalues of an approximation to the factors."""
    notes = (
        ("approximate", "approximate, as a sketch stands for G of"),
        ("estimated", "eigenvalues estimated between bounds in"),
    )
    layers = [(note, _field(model, name)) for name, note in notes]
    return [f"{note} {', '.join(shorten_all(names))}" for note, names in layers if names]


def _token_note(tokens: Any) -> str:  # noqa: ANN401 - a record, or what a service sends in its place
    """Return how few tokens carry a head's curvature, or why that is not known."""
    layer = shorten(str(_field(tokens, "layer")))
    why = _field(tokens, "why")
    if why is not None:
        return f"no token importance of {layer}: {why}"
    few, every = format_number(_field(tokens, "tokens_for_99_percent")), format_number(_field(tokens, "tokens"))
    return f"{few} of {every} tokens carry 99 % of the trace of G of {layer}"


def _exact_comparison(exact: Any) -> str:  # noqa: ANN401 - a record, or what a service sends in its place
    """Return K-FAC's trace and largest eigenvalue, each beside that of the exact curvature."""
    low, high = format_number(_field(exact, "trace_low")), format_number(_field(exact, "trace_high"))
    text = (
        f"trace {format_number(_field(exact, 'kronecker_trace'))} where the exact one is "
        f"{format_number(_field(exact, 'trace'))} ({low} to {high})"
    )
    top = _field(exact, "top_eigenvalue")
    if top is None:
        return text
    at_least = "" if _field(exact, "top_converged") else "at least "
    largest = format_number(_field(exact, "kronecker_spectral_norm"))
    return f"{text}, largest eigenvalue {largest} where it is {at_least}{format_number(top)}"


def reuse_lines(rows: Sequence[Layer]) -> list[str]:
    """Return a line for each earlier job with cached factors that the results are based on."""
    sources = dict.fromkeys(row.observed.factors_from for row in rows if row.observed is not None)
    return [f"factors from the cache: those of job {source}" for source in sources if source]


def _layers(count: Any) -> str:  # noqa: ANN401 - as summaries of analyses unknown here have it
    return f"{format_number(count)} layer{'' if count == 1 else 's'}"


def _generic_columns(rows: Sequence[Layer]) -> tuple[Column, ...]:
    """Return columns of the first five figures of an analysis that this client does not know."""
    metrics: Any = next((row.metrics for row in rows if row.metrics is not None), {})
    named = vars(metrics) if dataclasses.is_dataclass(metrics) else metrics
    figures = [
        name for name, value in named.items() if isinstance(value, (int, float)) and not isinstance(value, bool)
    ][:5]
    return tuple((name, _metric(name)) for name in figures) or (("status", lambda row: row.status),)
