import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from worker.execution.files.safetensors_header import read_header
from worker.execution.refusal import Refusal

GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def header(value: Any, data: bytes = b"\0" * 8) -> Any:
    text = json.dumps(value).encode() if not isinstance(value, bytes) else value
    return len(text).to_bytes(8, "little") + text + data


def entry(**changes: Any) -> Any:
    return {"a": GOOD["a"] | changes}


BAD = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "header length 0": (0).to_bytes(8, "little"),
    "header length 2^63": (2**63).to_bytes(8, "little") + b"{}",
    "header past the end": (100).to_bytes(8, "little") + b"{}",
    "not JSON": header(b"{nope"),
    "a list": header([]),
    "no tensors": header({}),
    "only metadata": header({"__metadata__": {"a": "b"}}),
    "trailing bytes": header(GOOD, b"\0" * 9),
    "data cut short": header(GOOD, b"\0" * 7),
    "hole": header({"a": entry()["a"], "b": {"dtype": "U8", "shape": [1], "data_offsets": [9, 10]}}, b"\0" * 10),
    "overlap": header({"a": entry()["a"], "b": {"dtype": "U8", "shape": [1], "data_offsets": [7, 8]}}),
    "shape against bytes": header(entry(shape=[3])),
    "negative dimension": header(entry(shape=[-2])),
    "overflow": header(entry(shape=[2**62, 2**62])),
    "fractional dimension": header(entry(shape=[2.0])),
    "a flag as dimension": header(entry(shape=[True, 2])),
    "100,001 dimensions": header(entry(shape=[1] * 100_001)),
    "unknown dtype": header(entry(dtype="X9")),
    "a dtype that is a list": header(entry(dtype=["F32"])),
    "a dtype that is an object": header(entry(dtype={"F32": 1})),
    "a shape that is a text": header(entry(shape="")),
    "a shape that is an object": header(entry(shape={}, data_offsets=[0, 4])),
    "offsets that are a text": header(entry(data_offsets="08")),
    "offsets that are an object": header(entry(data_offsets={"0": 0, "8": 8})),
    "an entry that is a text": header({"a": "F32"}),
    "an entry with something else": header(entry(evil=1)),
    "a product that is 0 only at its end": header(entry(shape=[2**61, 2**61, 0], data_offsets=[0, 0]), b""),
    "metadata that are a list": header({"__metadata__": ["pt"]} | GOOD),
    "metadata of numbers": header({"__metadata__": {"format": 5}} | GOOD),
    "metadata of metadata": header({"__metadata__": {"format": {"a": "pt"}}} | GOOD),
    "metadata with half a surrogate pair": header({"__metadata__": {"format": "\ud800"}} | GOOD),
    "metadata that are NaN": header(b'{"__metadata__":NaN,' + json.dumps(GOOD).encode()[1:]),
    "a header in UTF-16": header(json.dumps(GOOD).encode("utf-16")),
    "no offsets": header({"a": {"dtype": "F32", "shape": [2]}}),
    "backward offsets": header(entry(data_offsets=[8, 0])),
    "empty name": header({"": GOOD["a"]}),
    "name out of the folder": header({"../../etc/passwd": GOOD["a"]}),
    "name with markup": header({"<script>": GOOD["a"]}),
    "name twice": header(b'{"a":' + json.dumps(GOOD["a"]).encode() + b',"a":' + json.dumps(GOOD["a"]).encode() + b"}"),
    "5 MB of metadata and no tensor": header({"__metadata__": {"a": "x" * 5_000_000}}),
    "nine MB of header": header({"__metadata__": {"a": "x" * 9_000_000}} | GOOD),
    "too many tensors": header(
        {f"t{n}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for n in range(20_001)}, b""
    ),
    "deep": header(b'{"a":' + b"[" * 200_000),
    "pickle": pickle.dumps({"weights": list(range(100))}),
    "zip": b"PK\x03\x04" + b"\0" * 100,
    "GGUF": b"GGUF\x03\0\0\0" + b"\0" * 100,
    "HDF5": b"\x89HDF\r\n\x1a\n" + b"\0" * 100,
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_refused_with_its_field(tmp_path: Path, what: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(BAD[what])
    with pytest.raises(Refusal) as refused:
        read_header(path, "/model/path")
    assert refused.value.pointer == "/model/path"
    assert refused.value.code == "broken_safetensors"
    assert refused.value.message.startswith("model.safetensors ")


@pytest.mark.parametrize(
    ("what", "said"), [("pickle", "pickle"), ("zip", "zip archive"), ("GGUF", "GGUF"), ("HDF5", "HDF5")]
)
def test_foreign_formats_are_told_by_name(tmp_path: Path, what: str, said: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(BAD[what])
    with pytest.raises(Refusal, match=said):
        read_header(path, "/model/path")


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}])
def test_what_these_rules_accept_the_library_opens(tmp_path: Path, metadata: Any) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(header(GOOD if metadata is None else {"__metadata__": metadata} | GOOD))
    assert list(read_header(path, "/model/path")) == list(safetensors.torch.load_file(path)) == ["a"]


def test_a_dtype_that_is_not_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(BAD["unknown dtype"])
    with pytest.raises(Refusal, match=r"gives `a` the dtype 'X9'; save it as one of BOOL, U8, .*F32") as refused:
        read_header(path, "/model/path")
    assert len(refused.value.message) < 250


def test_complex_numbers_do_not_keep_others_from_being_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"z": torch.zeros(2, 3, dtype=torch.complex64), "a": torch.zeros(2)}
    safetensors.torch.save_file(tensors, path)
    found = read_header(path, "/model/path")
    assert {name: (entry.dtype, entry.shape) for name, entry in found.items()} == {
        "z": ("C64", (2, 3)),
        "a": ("F32", (2,)),
    }


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"b": torch.zeros(2, 3), "a.c-d_e/f": torch.zeros(0), "s": torch.tensor(1, dtype=torch.int64)}
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    found = read_header(path, "/model/path")
    assert {name: entry.shape for name, entry in found.items()} == {"b": (2, 3), "a.c-d_e/f": (0,), "s": ()}


def test_a_header_whose_length_begins_like_a_pickle_is_no_pickle(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    text = json.dumps(GOOD).encode().ljust(0x280)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 8)
    assert read_header(path, "/model/path")["a"].shape == (2,)
