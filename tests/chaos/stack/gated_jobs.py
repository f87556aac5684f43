"""Jobs that stop, die or kill their worker at named points (``factories/kronoscope_gated.py`` names them)."""

from pathlib import Path
from typing import Any

from tests.chaos.stack.stack import Stack
from tests.machine.stopwatch import until

BATCHES = 20


class GatedJob:
    """One job of a stack, held by files."""

    def __init__(self, stack: Stack, name: str, *, seconds: float = 0.0, **changes: Any) -> None:
        self.stack = stack
        self.name = name
        self.gates = stack.folder / "gates"
        self.gates.mkdir(exist_ok=True)
        self.document = document(folder=str(self.gates), name=name, seconds=seconds) | changes
        self.id = ""

    def submit(self) -> str:
        """Submit it; what is to hold it must stand by then."""
        self.id = self.stack.submit(self.document)
        return self.id

    def hold(self, point: str) -> None:
        self._file(point, "hold").touch()

    def die(self, point: str) -> None:
        """Have its computing process killed there, in every attempt."""
        self._file(point, "die").touch()

    def murder(self, point: str) -> None:
        """Have it kill -9 its worker there, in every attempt."""
        self._file(point, "murder").touch()

    def await_at(self, point: str, seconds: float = 300, *, writers: int = 1) -> None:
        """Wait until so many attempts wait there."""

        def there() -> bool:
            path = self._file(point, "seen")
            return path.exists() and path.stat().st_size >= writers

        until(there, seconds, lambda: f"{self.name} comes to {point}; {self.stack.describe(self.id)}")

    def seen_again(self, point: str) -> None:
        """Wait next for somebody else who comes there."""
        self._file(point, "seen").unlink()

    def forward_passes(self) -> int:
        """How often the model ran, in all attempts."""
        return (self.gates / f"{self.name}.passes").stat().st_size

    def release(self, point: str) -> None:
        for kind in ("hold", "seen"):
            self._file(point, kind).unlink(missing_ok=True)

    def _file(self, point: str, kind: str) -> Path:
        return self.gates / f"{self.name}.{point}.{kind}"


def document(**model: Any) -> dict[str, Any]:
    """A job of two analyses and six rows on twenty batches."""
    return {
        "kind": ["factors", "capacity"],
        "model": {"source": "factory", "factory": "kronoscope_gated:make", "kwargs": model},
        "data": {"source": "synthetic", "shape": [12], "examples": 4 * BATCHES, "classes": 3},
        "task": {"type": "classification"},
        # a gate counts forward passes
        "collection": {"batch_size": 4, "self_check": "off"},
    }


def outcomes(stack: Stack, job_id: str) -> list[tuple[Any, ...]]:
    """What must be the same however a job was disturbed: every row's place and digest."""
    return [(row.kind, row.ordinal, row.layer, row.sha256) for row in stack.layers(job_id)]


def quick_document(*script: list[Any]) -> dict[str, Any]:
    """A job for workers whose children only do what they are told (``quick_child.py``); two rows by default."""
    given = {"script": list(script)} if script else {}
    return document(**given) | {
        "kind": "capacity",
        "model": {"source": "factory", "factory": "kronoscope_quick:make", "kwargs": given},
    }
