"""Measure the structure: what one measurement and one whole job walk through, lines, and types asked by hand.

    python ops/measure_structure.py [CHECKOUT]

A whole job is the demo's, posted to an embedded service: its files are those of the project that API, worker and child
enter, from the request to the job's end. Lines are all lines of the product's Python files.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ops.count_walk import PACKAGES, count_walk
from ops.measure_source import FOLDERS, modules, near_identical

ASKED = {
    "isinstance(…, Structured)": r"isinstance\([^()]*\bStructured\b",
    "ndim == 1": r"\.ndim == 1\b",
    "ranks is None": r"\branks is (?:not )?None\b",
}
"""Questions in the place of a noun."""
_FOLLOW = """
import os, sys, threading
seen, root, out = set(), {root!r}, {out!r}
def follow(frame, event, _):
    path = frame.f_code.co_filename
    # functions alone: bodies of modules and classes run when they are imported
    if event == "call" and frame.f_code.co_flags & 1 and path not in seen:
        seen.add(path)
        if path.startswith(root):
            with open(os.path.join(out, str(os.getpid())), "a") as sink:
                sink.write(path[len(root):] + "\\n")
threading.setprofile(follow)
sys.setprofile(follow)
"""
_DOCUMENT = {
    "kind": ["factors", "capacity"],
    "model": {"source": "builtin", "name": "digits_cnn"},
    "data": {"source": "builtin", "name": "digits"},
    "task": {"type": "classification"},
}
_CLIENT = """
import json, sys, time
from kronoscope import Client
with Client(sys.argv[1]) as client:
    while not client.ready():
        time.sleep(0.2)
    for job in client.follow(client.submit(json.loads(sys.argv[2])).id):
        state = job.state
assert state == "succeeded", state
"""
_PORT = "8917"


def files_of_a_job(checkout: Path) -> dict[str, int]:
    """Return the number of the product's files that one whole job enters, in all and by folder.

    Args:
        checkout: A folder that holds the project.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out = folder / "entered"
        out.mkdir()
        (folder / "sitecustomize.py").write_text(_FOLLOW.format(root=f"{checkout}/", out=str(out)))
        environment = os.environ | {"PYTHONPATH": str(checkout)}
        served = environment | {"PYTHONPATH": f"{folder}:{checkout}"}
        start = "from kronoscope.cli import main; main()"
        command = [sys.executable, "-P", "-c", start, "serve", "--embedded", "--port", _PORT]
        with subprocess.Popen(  # noqa: S603 - ours
            [*command, "--data-dir", str(folder / "data")], env=served, cwd=folder, stdout=subprocess.DEVNULL
        ) as service:
            try:
                time.sleep(1)
                address = f"http://127.0.0.1:{_PORT}"
                client = [sys.executable, "-P", "-c", _CLIENT, address, json.dumps(_DOCUMENT)]
                subprocess.run(client, check=True, env=environment, timeout=300, cwd=folder)  # noqa: S603 - ours
            finally:
                service.terminate()
        entered = {line for each in out.iterdir() for line in each.read_text().splitlines()}
    own = {each.partition("/")[0] for each in entered} & set(PACKAGES)
    found = {package: sum(each.startswith(f"{package}/") for each in entered) for package in sorted(own)}
    return {"all": sum(found.values()), **found}


def measure_structure(checkout: Path) -> dict[str, object]:
    """Return all figures of a checkout."""
    found = list(modules(checkout))
    lines = {folder: sum(each.text.count("\n") for each in found if each.path.startswith(folder)) for folder in FOLDERS}
    return {
        "walk": count_walk(checkout),
        "files of a job": files_of_a_job(checkout),
        "lines": {"all": sum(lines.values()), **lines},
        "files": len(found),
        "asked": {name: sum(len(re.findall(each, one.text)) for one in found) for name, each in ASKED.items()},
        "near identical pairs": len(near_identical(found)),
    }


if __name__ == "__main__":
    print(json.dumps(measure_structure(Path(sys.argv[1] if sys.argv[1:] else ".").resolve()), indent=1))  # noqa: T201
