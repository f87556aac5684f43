"""What a job says at INFO: one line per layer, one closing line per analysis, warnings where the numbers need one.

The symbols stand in the text literally (``λ_G=``, ``policy=``, ``T=``, ``κ_A=``, ``κ_G=``), so that a log
can be searched for them. A dash is a value of a stage that did not run, or that is undefined.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from catalog.frames import Frame, LayerDone, LogLine, Summarised


class Narrator:
    """Says of each frame what is to be said, and remembers what the closing line needs."""

    def __init__(self, document: object) -> None:
        self._document = document if isinstance(document, Mapping) else {}
        self._policies: set[str] = set()
        self._woodbury: Counter[str] = Counter()

    def lines(self, frame: Frame) -> list[LogLine]:
        """Zero or more lines."""
        if isinstance(frame, LayerDone):
            record = frame.outcome.get("record") or {}
            self._woodbury[frame.kind] += record.get("branch") == "woodbury"
            policy = record.get("policy")
            if policy is not None:
                self._policies.add(str(policy))
            return layer_lines(frame)
        if isinstance(frame, Summarised):
            return closing_lines(frame, self._document, self._policies, self._woodbury[frame.kind])
        return []


def layer_lines(frame: LayerDone) -> list[LogLine]:
    """The INFO line of one layer and, where something was decomposed, its DEBUG line."""
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
                + f" κ_A={_value(record, 'kappa_A')} κ_G={_value(record, 'kappa_G')}"
                f" κ_max={_value(record, 'kappa_max')} update={_value(record, 'update_index')}"
                f" fisher={_value(record, 'fisher')} dtype={_value(record, 'dtype')}"
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
    return lines


def closing_lines(
    frame: Summarised, document: Mapping[str, Any], policies: Iterable[str], woodbury: int = 0
) -> list[LogLine]:
    """The closing INFO line of one analysis, and its warnings.

    Args:
        frame: The summary.
        document: The job document; its collection and stabilisation complete a summary without them.
        policies: The policies that the layers' records named.
        woodbury: How many layers' records name the branch `woodbury`; a summary that counts them goes before.
    """
    asked = {
        "update_freq": 1,
        "damping": 1e-4,
        "damping_mode": "relative",
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
                f" woodbury={summary.get('woodbury_layers', woodbury)}"
                f" {_counted(frame.kind, summary)}"
                f" policy={','.join(sorted(set(policies))) or '-'} update_freq={_value(summary, 'update_freq')}"
                f" damping={_value(summary, 'damping')} ({summary['damping_mode']})"
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


def _counted(kind: str, summary: Mapping[str, Any]) -> str:
    """What an analysis counts: decompositions, or what was clipped of them."""
    if kind != "reconstruction":
        return f"eigendecompositions={_value(summary, 'eigendecompositions')}"
    return (
        f"factors={_value(summary, 'factors')} clipped={_value(summary, 'clipped')} of {_value(summary, 'eigenvalues')}"
        f" floor_kept={_value(summary, 'floor_kept')} κ_reached={_value(summary, 'kappa_reached')}"
    )


def printable(name: str) -> str:
    """``name`` without control characters, so that no layer's name starts a line of its own."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in name)


def _value(source: Mapping[str, Any], name: str) -> str:
    value = source.get(name)
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
