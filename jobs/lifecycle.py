"""The lifecycle of a job: its states and the moves between them, in one table for the SQL's conditions.

::

    queued ──> running ──> succeeded | failed
      │ ↑ └──────┘ │ │     (back: handed back, reaped, transient failure)
      │ │          │ └───> cancelling ──> cancelled
      │ └─ waiting ┘       (divided: for its pieces, see ``jobs.queue.division``; back when all have succeeded)
      │       └──────────> failed (with a piece) | cancelling | cancelled
      │                    (a series waits for its checkpoints from the beginning, and ends: ``jobs.queue.series``)
      └──> failed (at its deadline) | cancelled

A job that is being cancelled ends `cancelled` whatever its attempt reports meanwhile: a caller
who was answered `cancelling` need not ask again.
"""

from catalog.responses.views import JobState

State = JobState

LEGAL_MOVES: dict[State, frozenset[State]] = {
    "queued": frozenset({"running", "failed", "cancelled"}),
    "running": frozenset({"queued", "waiting", "cancelling", "succeeded", "failed"}),
    "waiting": frozenset({"queued", "cancelling", "succeeded", "failed", "cancelled"}),
    "cancelling": frozenset({"cancelled"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}

STATES: tuple[State, ...] = tuple(LEGAL_MOVES)

TERMINAL: frozenset[State] = frozenset(state for state, moves in LEGAL_MOVES.items() if not moves)

OPEN = sorted({*STATES} - TERMINAL)
"""The others, in an order that stays."""

HELD: frozenset[State] = frozenset({"running", "cancelling"})
"""States in which an attempt holds a lease and may write; a job that was cancelled while it waited for its pieces is
`cancelling` without one until the last of them has stopped."""


def ending(state: State, wanted: State) -> State:
    """Return the state a held job moves to at an attempt's end: `cancelled` if that was asked for, else `wanted`."""
    return "cancelled" if state == "cancelling" else wanted
