"""A child that divides its job once: it stands in for ``worker.execution`` where a foreground run is to be killed.

python -S -P dividing_child.py '{"count": 3, ...}' --frames FD

Each piece and each attempt of the job writes a line into ``log``: what it was told. ``wait`` and ``fail`` name the
piece (from 0) that waits to be killed, and the one that fails. Frames are written as they cross the pipe, so that
nothing is imported for them.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    script = json.loads(sys.argv[1])
    pipe = int(sys.argv[sys.argv.index("--frames") + 1])
    assignment = json.load(sys.stdin)
    piece, count = assignment.get("piece"), script["count"]

    def send(frame: str, **fields: Any) -> None:
        os.write(pipe, json.dumps({"frame": frame, **fields}).encode() + b"\n")

    def write(name: str, text: str) -> None:
        path = Path(assignment["artifacts"]) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        send("artifact", name=name, sha256=sha256, size_bytes=len(text), media_type="application/json")

    told = {name: assignment.get(name) for name in ("piece", "pieces", "divided", "plan")}
    with Path(script["log"]).open("a") as log:
        log.write(json.dumps(told) + "\n")
    if piece is not None:
        send("log", level="info", message="at work")
        if piece["index"] == script.get("fail"):
            send("failed", category="usage", code="no", message="it is bad", pointer="/data", layer=None, detail=None)
            sys.exit(2)
        if piece["index"] == script.get("wait") and not Path(script["go"]).exists():
            Path(script["here"]).touch()
            signal.sigwait([signal.SIGTERM])
            send("stopped")
            sys.exit(5)
        write("factors/factors.index.json", json.dumps(piece["index"]))
        send("finished", model_sha256="m", data_sha256=f"d{piece['index']}", examples=piece["end"] - piece["begin"])
        sys.exit(0)
    if not assignment.get("pieces"):
        send("planned", plan={"micro_batch": 7})
        places = {"round": "collect", "count": count, "total": 10 * count}
        pieces = [{**places, "index": each, "begin": 10 * each, "end": 10 * each + 10} for each in range(count)]
        send("divided", round="collect", pieces=pieces)
        sys.exit(6)
    if script.get("damaged"):
        said = "layer `a`: `gradient_covariance` is not what is recorded; collect the factors again"
        fault = {"category": "usage", "code": "broken_factors", "message": said, "pointer": "/factors"}
        send("failed", **fault, layer="a", detail=None)
        sys.exit(2)
    write("spectra/0.json", json.dumps([Path(each["path"]).name for each in assignment["pieces"]]))
    send("finished", model_sha256="m", data_sha256="all", examples=10 * count)
    sys.exit(0)
