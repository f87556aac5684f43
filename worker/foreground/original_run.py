"""The original run: the folder of the run that a foreground run reproduces, and how both are read to be compared."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from catalog.record import FieldError
from catalog.responses.reproduction import Run, reason_unreproducible


def run_of(name: str, job: Mapping[str, Any], results: Mapping[str, Any]) -> Run:
    """Return a run by the contents of its `job.json`, which is its manifest too, and of its `results.json`."""
    files = {each["name"]: each["sha256"] for each in job["artifacts"]}
    return Run(name, job, job["plan"], results["layers"], results["summary"], files)


def read_original(document: Any, output: Path) -> Run | None:  # noqa: ANN401 - the child has not judged it yet
    """Read the run that a document reproduces, if it does; a FieldError says why it cannot be reproduced."""
    named = document.get("reproduces") if isinstance(document, dict) else None
    if not isinstance(named, str):
        return None
    folder = Path(named)
    try:
        job = json.loads((folder / "job.json").read_bytes())
        why = reason_unreproducible(job["state"], job, job["document"], document)
        original = None if why else run_of(named, job, json.loads((folder / "results.json").read_bytes()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"names {named}, which cannot be read as a run ({error}); give the folder of a `kronoscope run`"
    if why is None and folder.resolve() == output.resolve():
        why = f"names {named}, which stays as it is; give another folder for the output"
    if why is not None:
        raise FieldError("reproduces", why)
    return original
