"""A child that does what its script says: it stands in for ``worker.execution`` where processes are made to fail.

python -S -P scripted_child.py '[["log", "hello"], ["finish"]]' --frames FD

It begins in a fifth of the time by writing frames as they cross the pipe, where the reader holds them to their fields,
and by importing what few steps need in these.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


class Script:
    """One run of the script; every method is a step."""

    def __init__(self, frames: Any) -> None:
        self.frames = frames
        self.assignment = None

    def send(self, frame: str, **fields: Any) -> None:
        os.write(self.frames, json.dumps({"frame": frame, **fields}).encode() + b"\n")

    def read(self) -> None:
        self.assignment = json.load(sys.stdin)

    def echo_assignment(self) -> None:
        self.log(json.dumps(self.assignment))

    def echo_environment(self) -> None:
        self.log(json.dumps(dict(os.environ)))

    def echo_factors(self) -> None:
        """The files that were laid out, each with its text."""
        self._echo("factors_path")

    def echo_against(self) -> None:
        """The same of the second set."""
        self._echo("against_path")

    def echo_upload(self) -> None:
        """The same of the model's upload."""
        self._echo("model_path")

    def echo_extended(self) -> None:
        """The same of the job that is extended, and the model that its document names."""
        extended = self.assignment["extends"]
        place = Path(extended["path"])
        files = {each.name: each.read_text() for each in sorted(place.iterdir())}
        self.log(json.dumps([files, extended["document"]["model"], extended["document"]["extends"]]))

    def _echo(self, name: str) -> None:
        place = Path(self.assignment[name])
        self.log(json.dumps({each.name: each.read_text() for each in sorted(place.iterdir())}))

    def log(self, message: Any, level: Any = "info") -> None:
        self.send("log", level=level, message=message)

    def chatter(self, lines: Any) -> None:
        for _ in range(lines):
            self.log("x" * 1000)

    def pids(self) -> None:
        """Own pid, and that of a process of its own that would live for ten minutes."""
        import subprocess  # noqa: PLC0415

        sleeper = subprocess.Popen(["sleep", "600"])
        self.log(json.dumps([os.getpid(), sleeper.pid]))

    def detached(self) -> None:
        """The pid of a process in a session of its own, with all pipes of this one, that would live for ten minutes."""
        daemon = os.fork()
        if not daemon:
            os.setsid()
            time.sleep(600)
            os._exit(0)
        self.log(str(daemon))

    def started(self) -> None:
        self.send("started", environment={"device": "cpu", "threads": self.assignment.get("threads")})

    def progress(self, stage: Any, done: Any, total: Any, unit: Any = "layers", kept: Any = False) -> None:
        self.send("progress", stage=stage, done=done, total=total, unit=unit, kept=kept)

    def plan(self, plan: Any) -> None:
        self.send("planned", plan=plan)

    def layer(self, ordinal: Any, layer: Any = None, kind: Any = "capacity", value: Any = 1.0) -> None:
        if [kind, ordinal] not in self.assignment["completed"]:
            self.send("layer", **_row(kind, ordinal, layer or f"layer{ordinal}", value))

    def artifact(self, name: Any, text: Any, announced: Any = None) -> None:
        path = Path(self.assignment["artifacts"]) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        content = (announced or text).encode()
        self.send("artifact", **_announced(name, content), media_type="application/json")

    def summary(self, kind: Any = "capacity", **values: Any) -> None:
        self.send("summary", kind=kind, summary={"layers": 1, "branches": {"eigendecomposition": 2}, **values})

    def fill_cache(self, key: Any, files: Any, link: Any = None) -> None:
        """Leave an entry: files by name; with a link, the first is one to there, and announced as what it leads to."""
        place = Path(self.assignment["artifacts"]) / ".filled"
        listed = []
        for number, (name, text) in enumerate(files.items()):
            path = place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if link is None or number:
                path.write_text(text)
                # second names, by which it can be written to whatever becomes of the first
                os.link(path, place.with_name(f"second{number}"))
            else:
                path.symlink_to(link)
            listed.append(_announced(name, path.read_bytes()))
        self.send("cache_filled", key=key, files=listed)

    def scale_seconds(self) -> None:
        """Change what was left, by its second names."""
        for path in Path(self.assignment["artifacts"]).glob("second*"):
            path.write_text(path.read_text().swapcase())

    def ask_cache(self, key: Any) -> None:
        """Say what the parent answers, and the files that are then there."""
        self.send("cache_asked", key=key)
        answers = int(sys.argv[sys.argv.index("--answers") + 1])
        line = b""
        while not line.endswith(b"\n"):
            line += os.read(answers, 4096)
        view = Path(self.assignment["cache"])
        files = {str(each.relative_to(view)): each.read_text() for each in sorted(view.rglob("*")) if each.is_file()}
        self.log(json.dumps({"job": json.loads(line)["job"], "files": files}))

    def say(self, text: Any) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    def raw(self, text: Any) -> None:
        os.write(self.frames, text.encode())

    def raw_file(self, path: Any) -> None:
        """The bytes of a file, which may be longer than a command line."""
        left = memoryview(Path(path).read_bytes())
        while left:
            left = left[os.write(self.frames, left) :]

    def flood(self, count: Any) -> None:
        """Bytes without an end of line."""
        for _ in range(count // 65_536):
            os.write(self.frames, b"x" * 65_536)

    def ignore_sigterm(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def wait_for_sigterm(self) -> None:
        """As the real child does at a checkpoint."""
        signal.sigwait([signal.SIGTERM])
        self.send("stopped")
        sys.exit(5)

    def wait_for(self, path: Any) -> None:
        while not Path(path).exists():
            time.sleep(0.01)

    def sleep(self, seconds: Any) -> None:
        time.sleep(seconds)

    def work_in_scratch(self) -> None:
        """Leave a checkpoint."""
        place = Path(self.assignment["scratch"])
        place.mkdir(parents=True, exist_ok=True)
        (place / "sums").touch()

    def kill_self(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def kill_self_once(self, path: Any) -> None:
        """Die in the first attempt only."""
        if not Path(path).exists():
            Path(path).touch()
            self.kill_self()

    def exit(self, code: Any) -> None:
        sys.exit(code)

    def fail(self, category: Any, code: Any = "scripted", message: Any = "the script says so") -> None:
        self.send(
            "failed", category=category, code=code, message=message, pointer=None, layer=None, detail="for operators"
        )
        sys.exit({"usage": 2, "transient": 3, "fatal": 4}[category])

    def divide(self, count: Any, round_name: Any = "collect", gate: Any = None) -> None:
        """Leave a round to pieces of two examples each, unless its pieces are there already."""
        if any(each["piece"]["round"] == round_name for each in self.assignment["pieces"]):
            return
        if gate is not None:
            self.wait_for(gate)
        pieces = [
            {"round": round_name, "index": n, "count": count, "begin": 2 * n, "end": 2 * n + 2, "total": 2 * count}
            for n in range(count)
        ]
        self.send("divided", round=round_name, pieces=pieces)
        sys.exit(6)

    def if_piece(self, *steps: Any) -> None:
        """What a piece does in place of the rest; a division comes after it in the script."""
        if self.assignment["piece"] is not None:
            for name, *arguments in steps:
                getattr(self, name)(*arguments)

    def collect(self, pause: Any = 0) -> None:
        """The file of a piece: the squares of its examples, and what earlier rounds have left."""
        piece = self.assignment["piece"]
        self.progress("collection", 0, 2, "batches")
        time.sleep(pause)
        self.progress("collection", 2, 2, "batches")
        squares = [each**2 for each in range(piece["begin"], piece["end"])]
        self.artifact("factors/squares.json", json.dumps({"squares": squares, "before": self._sums()}))

    def merge(self) -> None:
        """The file and row of the whole: the sum over all pieces, in their order."""
        self.artifact("factors/sum.json", json.dumps(self._sums()))
        self.layer(0, value=float(sum(self._sums().values())))

    def _sums(self) -> Any:
        """The sum of each round before, read from where it was laid out."""
        sums: Any = {}
        for each in self.assignment["pieces"]:
            told = json.loads((Path(each["path"]) / "factors/squares.json").read_text())
            name = each["piece"]["round"]
            sums[name] = sums.get(name, 0) + sum(told["squares"])
        if self.assignment["divided"] is not None:
            sums["own"] = len(list(Path(self.assignment["divided"]).rglob("*.json")))
        return sums

    def finish(self, examples: Any = None, refused: Any = ()) -> None:
        digest = None if examples is None else "5" * 64
        self.send("finished", model_sha256=digest, examples=examples, refused=list(refused))
        sys.exit(0)


def _row(kind: Any, ordinal: Any, layer: Any, value: Any) -> Any:
    record = {"in_dim": 3, "out_dim": 2, "branch": "eigendecomposition", "policy": "dense", "positions": 17,
              "lambda_A": 0.01, "lambda_G": 0.5, "kappa_A": 10.0, "kappa_G": None}  # fmt: skip
    outcome = {
        "kind": kind,
        "ordinal": ordinal,
        "layer": layer,
        "module": "Linear",
        "status": "covered",
        "reason": None,
        "parameters": [f"{layer}.weight"],
        "parameter_count": 6,
        "metrics": {"effective_rank": value},
        "record": record,
    }
    observed = {"seconds": 0.1, "measured_peak_bytes": 5}
    return {"kind": kind, "ordinal": ordinal, "layer": layer, "outcome": outcome, "observed": observed}


def _announced(name: Any, content: Any) -> Any:
    import hashlib  # noqa: PLC0415

    return {"name": name, "sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content)}


if __name__ == "__main__":
    # blocked before anything else, so that wait_for_sigterm misses none; other steps unblock it
    steps = json.loads(sys.argv[1])
    waits = any(step[0] == "wait_for_sigterm" for step in steps)
    if waits:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    script = Script(int(sys.argv[sys.argv.index("--frames") + 1]))
    if all(step[0] != "never_read" for step in steps):
        script.read()
    for name, *arguments in steps:
        if name != "never_read":
            getattr(script, name)(*arguments)
