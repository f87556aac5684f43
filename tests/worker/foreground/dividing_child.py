"""A child that divides its job once: it stands in for ``worker.execution`` where a foreground run is to be killed.

python -P dividing_child.py '{"count": 3, ...}' --frames FD

Each piece and each attempt of the job writes a line into ``log``: what it was told. ``wait`` and ``fail`` name the
piece (from 0) that waits to be killed, and the one that fails.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

from catalog.frames import ArtifactWritten, Divided, Failed, Finished, Frame, LogLine, Planned, Stopped, encode
from catalog.record import plain
from catalog.requests.pieces import Piece

if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    script = json.loads(sys.argv[1])
    pipe = int(sys.argv[sys.argv.index("--frames") + 1])
    assignment = json.load(sys.stdin)
    piece, count = assignment.get("piece"), script["count"]

    def send(frame: Frame) -> None:
        os.write(pipe, encode(frame))

    def write(name: str, text: str) -> None:
        path = Path(assignment["artifacts"]) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        send(ArtifactWritten(name=name, sha256=sha256, size_bytes=len(text), media_type="application/json"))

    told = {name: assignment.get(name) for name in ("piece", "pieces", "divided", "plan")}
    with Path(script["log"]).open("a") as log:
        log.write(json.dumps(told) + "\n")
    if piece is not None:
        send(LogLine(level="info", message="at work"))
        if piece["index"] == script.get("fail"):
            send(Failed(category="usage", code="no", message="it is bad", pointer="/data", layer=None, detail=None))
            sys.exit(2)
        if piece["index"] == script.get("wait") and not Path(script["go"]).exists():
            Path(script["here"]).touch()
            signal.sigwait([signal.SIGTERM])
            send(Stopped())
            sys.exit(5)
        write("factors/factors.index.json", json.dumps(piece["index"]))
        send(Finished(model_sha256="m", data_sha256=f"d{piece['index']}", examples=piece["end"] - piece["begin"]))
        sys.exit(0)
    if not assignment.get("pieces"):
        send(Planned(plan={"micro_batch": 7}))
        pieces = [
            Piece(round="collect", index=index, count=count, begin=10 * index, end=10 * index + 10, total=10 * count)
            for index in range(count)
        ]
        send(Divided(round="collect", pieces=tuple(plain(each) for each in pieces)))
        sys.exit(6)
    write("spectra/0.json", json.dumps([Path(each["path"]).name for each in assignment["pieces"]]))
    send(Finished(model_sha256="m", data_sha256="all", examples=10 * count))
    sys.exit(0)
