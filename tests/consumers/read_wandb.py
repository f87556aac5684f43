"""The offline run of Weights & Biases holds what `kronoscope export --to wandb` has written: config, history, files."""

import json
import struct
import sys
from pathlib import Path

from wandb.proto import wandb_internal_pb2

sys.path.insert(0, sys.argv[2])
from tracked import RUN, exported, metrics

BLOCK, HEADER = 32_768, struct.Struct("<IHB")
WHOLE, LAST = 1, 4


def records(path: Path) -> list[wandb_internal_pb2.Record]:
    """The records of an offline run, in order: a log of LevelDB's format after seven bytes, which wandb syncs from."""
    content, place, parts, found = path.read_bytes(), 7, b"", []
    assert content.startswith(b":W&B")
    while place < len(content):
        left = BLOCK - place % BLOCK
        if left < HEADER.size:
            place += left
            continue
        _, length, kind = HEADER.unpack_from(content, place)
        parts += content[place + HEADER.size : place + HEADER.size + length]
        place += HEADER.size + length
        if kind in (WHOLE, LAST):
            found.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return found


def main() -> None:
    folder = Path(sys.argv[1]) / "wandb"
    exported("wandb", folder)
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    found = records(path)
    config = {each.key: json.loads(each.value_json) for record in found for each in record.run.config.update}
    job = json.loads((RUN / "job.json").read_text())
    assert config["model_sha256"] == job["model_sha256"]
    assert config["document"]["model"] == {**config["document"]["model"], **job["document"]["model"]}
    history = {}
    for record in found:
        items = {each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in record.history.item}
        step = record.history.step.num if record.HasField("history") else None
        history.update({(name, step): value for name, value in items.items()})
    wanted = metrics()
    assert len(wanted) > 20
    for (name, step), value in wanted.items():
        assert history[name, step] == value, (name, step)
    manifest = {each.path for record in found for each in record.request.log_artifact.artifact.manifest.contents}
    manifest |= {each.path for record in found for each in record.artifact.manifest.contents}
    assert "layers.csv" in manifest, manifest
    assert found[-1].HasField("exit")
    # as on a disk that is full
    said = exported("wandb", folder.with_name("cut"), code=4, limit="16")
    assert "ends before the run does" in said, said
    print(f"  {len(wanted)} metrics at their layers")


main()
