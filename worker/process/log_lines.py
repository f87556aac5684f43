"""Log lines of a job at INFO: one for each layer, one for each analysis, warnings where the numbers need one.

At DEBUG a layer has a line more: ranks and clipped eigenvalues, and of a collection the positions that were summed here
and over all ranks (``T_local=``, ``T_global=``), the ``world_size=``, and the bytes that the sums were reduced by.

The symbols stand in the text literally (``λ_G=``, ``policy=``, ``T=``, ``κ_A=``, ``κ_G=``), so that a log
can be searched for them. A dash is a value of a stage that did not run, or that is undefined. A condition
number stands before and after clipping, ``κ_A=inf→1e+06``; a singular side's is ``inf``.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from catalog import ANALYSES
from catalog.frames import Frame, LayerDone, LogLine, Summarised

_COUNTED = {
    "woodbury": "woodbury",
    "softmax_head": "softmax",
    "eigendecomposition": "eigendecomposition",
    "block": "block",
    "diagonal": "diagonal",
    "diagonal_block": "diagonal",
}
"""Names of a layer's branches in the closing line; one that is new keeps its name."""


class LogFormatter:
    """Says of each frame what is to be said, and remembers what the closing line needs."""

    def __init__(self, document: object) -> None:
        self._document = document if isinstance(document, Mapping) else {}
        self._policies: set[str] = set()
        self._dampings: dict[str, Dampings] = {}
        self._branches: dict[str, Counter[str]] = {}

    def lines(self, frame: Frame) -> list[LogLine]:
        """Return the log lines of a frame, and count its layer for the closing line."""
        analysis = ANALYSES.get(frame.kind) if isinstance(frame, (LayerDone, Summarised)) else None
        if isinstance(frame, LayerDone) and analysis is not None and analysis.log_row is not None:
            return [_plain_row(frame, analysis.log_row(frame.outcome.get("metrics") or {}))]
        if isinstance(frame, Summarised) and analysis is not None and analysis.log_summary is not None:
            return [LogLine(level="info", message=f"{frame.kind} done: {analysis.log_summary(frame.summary)}")]
        if isinstance(frame, LayerDone):
            record = frame.outcome.get("record") or {}
            if frame.outcome.get("status") != "declared" and record.get("branch"):
                self._branches.setdefault(frame.kind, Counter())[str(record["branch"])] += 1
            policy = record.get("policy")
            if policy is not None:
                self._policies.add(str(policy))
            self._dampings.setdefault(frame.kind, Dampings()).add(record)
            return layer_lines(frame)
        if isinstance(frame, Summarised):
            return closing_lines(
                frame,
                self._document,
                self._policies,
                self._branches.get(frame.kind, {}),
                self._dampings.get(frame.kind, Dampings()),
            )
        return []


def _plain_row(frame: LayerDone, text: str) -> LogLine:
    """The line of a row that no curvature was measured of."""
    return LogLine(
        level="info",
        message=f"{frame.kind} {frame.ordinal} {printable(frame.layer)}: "
        f"parameters={_value(frame.outcome, 'parameter_count')} {text}"
        f" seconds={_value(frame.observed, 'seconds')}",
    )


@dataclass
class Dampings:
    """The least and the largest damping of each side over the layers of one analysis."""

    bounds: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, record: Mapping[str, Any]) -> None:
        """Take in the dampings of one layer, where its record has them."""
        for name in _LAMBDAS:
            value = record.get(name)
            if isinstance(value, (int, float)):
                least, most = self.bounds.get(name, (value, value))
                self.bounds[name] = min(least, value), max(most, value)

    def shown(self) -> str:
        """Return the dampings as the closing line has them: one number, or the least and the largest."""
        said = []
        for name, symbol in _LAMBDAS.items():
            least, most = self.bounds.get(name, (None, None))
            if least is None or most is None:
                said.append(f"{symbol}=-")
            else:
                said.append(f"{symbol}={least:.6g}" if least == most else f"{symbol}={least:.6g}…{most:.6g}")
        return " ".join(said)


_LAMBDAS = {"lambda_A": "λ_A", "lambda_G": "λ_G"}


def layer_lines(frame: LayerDone) -> list[LogLine]:
    """Return the INFO line of one layer and, where something was decomposed, its DEBUG line."""
    outcome = frame.outcome
    record: Mapping[str, Any] = outcome.get("record") or {}
    lines = [
        LogLine(
            level="info",
            message=(
                f"{frame.kind} {frame.ordinal} {printable(frame.layer)}: {outcome.get('status')}"
                f" branch={_value(record, 'branch')} {_value(record, 'in_dim')}×{_value(record, 'out_dim')}"
                f" λ_A={_value(record, 'lambda_A')} λ_G={_value(record, 'lambda_G')}"
                f" policy={_value(record, 'policy')} T={_value(record, 'positions')}"
                + (f" rows={record['gradient_rows']}" if record.get("gradient_rows") is not None else "")
                + f" κ_A={_condition(record, 'A')} κ_G={_condition(record, 'G')}{_reached(outcome)}"
                f" κ_max={_value(record, 'kappa_max')} update={_value(record, 'update_index')}"
                f" fisher={_value(record, 'fisher')} {_stored(record)}"
                f" seconds={_value(frame.observed, 'seconds')}"
                f" peak_bytes={_value(frame.observed, 'measured_peak_bytes')}"
                + (f" reason={outcome['reason']}" if outcome.get("reason") else "")
            ),
        )
    ]
    metrics = outcome.get("metrics") or {}
    ranks = [f"{name}={_value(metrics, name)}" for name in metrics if "rank" in name]
    if ranks or record.get("clipped_A") is not None:
        clipped = f"clipped_A={_value(record, 'clipped_A')} clipped_G={_value(record, 'clipped_G')}"
        message = f"{frame.kind} {frame.ordinal} {printable(frame.layer)}: {clipped} {' '.join(ranks)}".rstrip()
        lines.append(LogLine(level="debug", message=message))
    if record.get("world_size") is not None:
        lines.append(LogLine(level="debug", message=_reduction(frame, record)))
    return lines


def _reduction(frame: LayerDone, record: Mapping[str, Any]) -> str:
    """How the sums of a layer were reduced: positions of this rank and of all, ranks, bytes."""
    return (
        f"{frame.kind} {frame.ordinal} {printable(frame.layer)}: T_local={_value(record, 'positions_local')}"
        f" T_global={_value(record, 'positions')} world_size={_value(record, 'world_size')}"
        f" reduction={_value(record, 'reduction')} sent_bytes={_value(record, 'sent_bytes')}"
        f" factor_bytes={_value(record, 'factor_bytes')}"
    )


def closing_lines(
    frame: Summarised,
    document: Mapping[str, Any],
    policies: Iterable[str],
    branches: Mapping[str, int] | None = None,
    dampings: Dampings | None = None,
) -> list[LogLine]:
    """Return the closing INFO line of one analysis, and its warnings."""
    asked = {
        "update_freq": 1,
        "damping": 1e-4,
        "damping_mode": "relative",
        "damping_split": "pi",
        "kappa_max": 1e6,
        **(document.get("collection") or {}),
        **(document.get("stabilisation") or {}),
    }
    summary = {**asked, **frame.summary}
    coverage = summary.get("coverage") or {}
    lines = [
        LogLine(
            level="info",
            message=(
                f"{frame.kind} done: layers={_value(summary, 'layers')}"
                f" {_by_branch(summary.get('branches') or branches or {})}"
                f"{_clipped(summary)}"
                f" policy={','.join(sorted(set(policies))) or '-'} update_freq={_value(summary, 'update_freq')}"
                f"{_asked_damping(summary)} {(dampings or Dampings()).shown()}"
                f" κ_max={_value(summary, 'kappa_max')} coverage={_value(coverage, 'covered_share')}"
                f" ({_value(coverage, 'covered_parameters')} of {_value(coverage, 'trainable_parameters')} parameters,"
                f" {_value(coverage, 'layers_declared')} layers declared)"
            ),
        )
    ]
    identity = summary.get("identity_layers") or ()
    if identity:
        shown = ", ".join(printable(str(name)) for name in identity[:5])
        more = f" and {len(identity) - 5} more" if len(identity) > 5 else ""
        lines.append(
            LogLine(
                level="warning",
                message=(
                    f"λ exceeds λ_max in {len(identity)} layer(s) ({shown}{more}): the preconditioner is the identity"
                    " there; lower stabilisation.damping, or give damping_A and damping_G"
                ),
            )
        )
    return lines


def _asked_damping(summary: Mapping[str, Any]) -> str:
    """The damping as it was asked for: one for both sides, but where a side has one of its own."""
    own = {side: summary.get(f"damping_{side}") for side in ("A", "G")}
    given = "".join(f" damping_{side}={value:.6g}" for side, value in own.items() if value is not None)
    both = None not in own.values()
    mode, split = summary["damping_mode"], summary["damping_split"]
    return f"{given} ({mode})" if both else f" damping={_value(summary, 'damping')}{given} ({mode}, {split})"


def _by_branch(branches: Mapping[str, int]) -> str:
    """Covered layers by branch, each layer once."""
    counts = dict.fromkeys(_COUNTED.values(), 0)
    for branch, count in branches.items():
        name = _COUNTED.get(branch, printable(branch))
        counts[name] = counts.get(name, 0) + count
    return " ".join(f"{name}={count}" for name, count in counts.items())


def _condition(record: Mapping[str, Any], side: str) -> str:
    """The condition number of one side before and after clipping; `inf` where the side is singular."""
    before, after = record.get(f"kappa_{side}"), record.get(f"kappa_{side}_clipped")
    # a count of the values below the floor implies a known spectrum
    singular = before is None and record.get(f"clipped_{side}") is not None
    shown = "inf" if singular else _value(record, f"kappa_{side}")
    return shown if after is None or after == before else f"{shown}→{after:.6g}"


def _reached(outcome: Mapping[str, Any]) -> str:
    """The condition numbers that a reconstruction came to, as its sides are stored."""
    metrics = outcome.get("metrics") or {}
    sides = {name: metrics.get(name) for name in ("A", "G")}
    return "".join(
        f" κ_{name}_stored={_value(side, 'kappa_reached')}"
        for name, side in sides.items()
        if isinstance(side, Mapping) and "kappa_reached" in side
    )


def _stored(record: Mapping[str, Any]) -> str:
    """In which precision the factors are kept, in how many bytes, and where."""
    rows = record.get("gradient_rows_dtype")
    place = "" if record.get("gradient_rows_device") is None else f" rows_on={record['gradient_rows_device']}"
    return (
        f"dtype_A={_value(record, 'dtype')} dtype_G={_value(record, 'dtype') if rows is None else rows}"
        f" bytes={_value(record, 'factor_bytes')} on={_value(record, 'storage_device')}"
        f" ({_value(record, 'storage_policy')}){place}"
    )


def _clipped(summary: Mapping[str, Any]) -> str:
    """Return the clipping part of the line; empty where the summary has none."""
    if "clipped" not in summary:
        return ""
    return (
        f" factors={_value(summary, 'factors')} clipped={_value(summary, 'clipped')}"
        f" of {_value(summary, 'eigenvalues')} floor_kept={_value(summary, 'floor_kept')}"
        f" κ_reached={_value(summary, 'kappa_reached')}"
    )


def printable(name: str) -> str:
    """Return a name without control characters, so that no layer's name starts a line of its own."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in name)


def _value(source: Mapping[str, Any], name: str) -> str:
    value = source.get(name)
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
