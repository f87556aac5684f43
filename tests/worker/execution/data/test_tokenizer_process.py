"""Tokenizer files as an enemy writes them: each ends as `usage` with the file's name, and takes no memory with it."""

import base64
import json
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import StopRequested
from tests.machine.stopwatch import Stopwatch
from worker.execution.data.apart import apart_process
from worker.execution.data.texts import tokenizer_process
from worker.execution.data.texts.tokenizer_process import TokenizerProcess
from worker.execution.failures import failure_of
from worker.execution.refusal import Refusal


def tokenizer_file(folder: Path, **parts: Any) -> Path:
    path = folder / "tokenizer.json"
    whole = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"},
    }  # fmt: skip
    path.write_text(json.dumps(whole | parts))
    return path


def precompiled(content: bytes) -> Any:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


def encoded(
    path: Path, texts: list[str], largest: int = 100, checkpoint: Callable[[], None] = lambda: None
) -> list[tuple[list[int], list[int], bool]]:
    with TokenizerProcess.start(
        path, {"length": 8, "masks": ["[UNK]"]}, largest, checkpoint, "/data/path"
    ) as tokenizer:
        assert tokenizer.mask_id == 2
        return [(found.ids, found.special, found.cut) for found in tokenizer.encode(texts, 0)]


def test_a_sound_file_gives_its_tokens_cut_to_the_length(tmp_path: Path) -> None:
    path = tokenizer_file(tmp_path)
    assert encoded(path, ["a b zzz", "", "a " * 100]) == [
        ([0, 1, 2], [0] * 3, False), ([], [], False), ([0] * 8, [0] * 8, True),
    ]  # fmt: skip


def endless(folder: Path) -> Path:
    """A file whose normaliser replaces every letter by itself, ten thousand times."""
    same = {"type": "Replace", "pattern": {"String": "a"}, "content": "a"}
    return tokenizer_file(folder, normalizer={"type": "Sequence", "normalizers": [same] * 10_000})


HOSTILE = {
    "an empty map": ({"normalizer": precompiled(b"")}, "cannot be read"),
    "a map that is a number": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": 5}}, "cannot be read"),
    "a map cut short": ({"normalizer": precompiled(b"\xff" * 4)}, "cannot be read"),
    "a map that points outside itself": ({"normalizer": precompiled(b"\x08\0\0\0" + b"\xff" * 8)}, "fails on text 0"),
    "another map that does": ({"normalizer": precompiled(b"\x10\0\0\0" + b"\xff\x05\0\0" * 4)}, "fails on text 0"),
    "no model": ({"model": {}}, "cannot be read"),
    "an unknown normaliser": ({"normalizer": {"type": "Evil"}}, "cannot be read"),
}


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("what", HOSTILE)
def test_what_makes_the_library_panic_is_the_files_fault(tmp_path: Path, what: str) -> None:
    parts, said = HOSTILE[what]
    with pytest.raises(Refusal, match=rf"^tokenizer\.json {said}: ") as refused:
        encoded(tokenizer_file(tmp_path, **parts), ["a hello"])
    failed = failure_of(refused.value)
    assert (failed.category, failed.code, failed.pointer) == ("usage", "broken_tokenizer", "/data/path")


def test_a_normaliser_that_makes_gigabytes_of_a_page_is_stopped(tmp_path: Path) -> None:
    grow = [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000} for _ in range(3)]
    path = tokenizer_file(tmp_path, normalizer={"type": "Sequence", "normalizers": grow})
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    # 1,000 letters become a terabyte
    with pytest.raises(Refusal, match=r"fails on text 0: .*needs more .*memory|more than 51\d MiB"):
        encoded(path, ["a" * 1000])
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss <= max(before, 600 * 1024)


def test_a_normaliser_that_never_ends_is_stopped_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_process, "_SECONDS", 1.0)
    watch = Stopwatch()
    with pytest.raises(Refusal, match=r"fails on text 0: it takes more than 1 s"):
        encoded(endless(tmp_path), ["a" * 200_000])
    assert watch.seconds() < 3


def test_a_stop_request_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)  # type: ignore[call-overload]
            started.append(self)

    monkeypatch.setattr(apart_process.subprocess, "Popen", Recorded)
    until = time.monotonic() + 1

    def checkpoint() -> None:
        if time.monotonic() > until:
            raise StopRequested

    with pytest.raises(StopRequested):
        encoded(endless(tmp_path), ["a" * 200_000], checkpoint=checkpoint)
    # by name: other tests of this process have children too
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_a_long_text_has_room(tmp_path: Path) -> None:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "merges": [], "unk_token": "[UNK]"}
    path = tokenizer_file(tmp_path, model=model, pre_tokenizer=None)
    assert encoded(path, ["ab" * 2**19], largest=2**20) == [([0, 1] * 4, [0] * 8, True)]


FRAMED = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "b", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
               {"SpecialToken": {"id": "b", "type_id": 0}}],
    "pair": [{"SpecialToken": {"id": "b", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
             {"SpecialToken": {"id": "b", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}},
             {"SpecialToken": {"id": "b", "type_id": 1}}],
    "special_tokens": {"b": {"id": "b", "ids": [1], "tokens": ["b"]}},
}  # fmt: skip
"""Two special tokens around a text, three around a pair."""


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_length_that_special_tokens_fill_is_refused(tmp_path: Path, pairs: bool, length: int) -> None:
    path = tokenizer_file(tmp_path, post_processor=FRAMED)
    least, what = (4, "3 special tokens to each pair of texts") if pairs else (3, "2 special tokens to each text")
    text: Any = ("a a", "a") if pairs else "a a"
    settings = {"length": length, "masks": [], "pairs": pairs}
    with TokenizerProcess.start(path, settings, 100, lambda: None, "/data/path") as tokenizer:
        if length >= least:
            tokenizer.require_room(length, "data")
            assert [(len(each.ids), each.cut) for each in tokenizer.encode([text], 0)] == [
                (length, pairs or length < 4)
            ]
            return
        with pytest.raises(
            Refusal, match=rf"at least {least} \(got {length}\).*{what}.*give {least} or more"
        ) as refused:
            tokenizer.require_room(length, "data")
        assert refused.value.pointer == "/data/sequence_length"
        with pytest.raises(Refusal, match=rf"at least {least} positions \(config\.json gives {length}\).*{what}"):
            tokenizer.require_room(128, "data")


def test_what_the_library_leaves_uncut_is_refused(tmp_path: Path) -> None:
    path = tokenizer_file(tmp_path, post_processor=FRAMED)
    with TokenizerProcess.start(path, {"length": 1, "masks": []}, 100, lambda: None, "/data/path") as tokenizer:
        with pytest.raises(Refusal, match=r"gives 4 tokens for text 7, and is to cut it to 1; give a larger"):
            tokenizer.encode(["a a"], 7)
        with pytest.raises(Refusal, match=r"gives 3 tokens for text 8, and is to cut it to 1; give a larger"):
            tokenizer.encode_words([["a"]], 8)
