"""A process of its own for a tokenizer.json, which is foreign: it may take any memory and time, or crash.

Rust's panics are no ``Exception``, some abort the process, and a normaliser can turn a page into gigabytes. So the
library runs apart, bounded by the kernel and by a clock, and whatever ends it is the fault of the file::

    parent                                    tokenizer process
    {"length": …, "masks": …}    ──────────>  limits its memory, reads the file
                                 <──────────  {"mask": id or null}, or {"error": "…"}
    ["text", ["one", "other"], …] ─────────>
                                 <──────────  [[ids, special, types, cut], …], or {"error": "…"}
    {"words": [["word", …], …]}  ──────────>
                                 <──────────  [[ids, words, cut], …], or {"error": "…"}

Each message is JSON after its length in 8 bytes, little-endian.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from worker.execution.files.open_files import ReadableFile
from worker.execution.loaded_model import Vocabulary
from worker.execution.refusal import Refusal

_PROGRAM = (sys.executable, "-P", "-m", "worker.execution.data.texts.tokenizer_program")
_SECONDS = 120.0
"""For one message of at most 1 MiB of text, on a machine that is busy with other things."""
_OWN_BYTES = 512 * 2**20
_BYTES_PER_FILE_BYTE = 32
_BYTES_PER_TEXT_BYTE = 512
"""Each token holds its text, offsets and masks; a tokenizer of characters makes one of every byte."""
_MOST_BYTES = 4 * 2**30
_LOOK_SECONDS = 0.2
_MOST_REPLY_BYTES = 2**30
_PASSED = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "VIRTUAL_ENV")


class Tokens(NamedTuple):
    """The tokens of one text."""

    ids: list[int]
    special: list[int]
    """1 for each token that the tokenizer added, else 0."""
    types: list[int]
    """1 for each token of the other half of a pair, else 0."""
    cut: bool
    """Whether there were more."""


class WordTokens(NamedTuple):
    """The tokens of one text that came as words."""

    ids: list[int]
    words: list[int | None]
    """The word that each token is of, counted from 0; None for a token that the tokenizer added."""
    cut: bool
    """Whether there were more."""


def tokenizer_settings(vocabulary: Vocabulary, length: int, masks: Sequence[str]) -> dict[str, Any]:
    """Return what a tokenizer is started with."""
    return {
        "length": length,
        "masks": list(masks),
        "side": vocabulary.truncation_side,
        "normaliser": dict(vocabulary.normaliser),
    }


class TokenizerProcess:
    """A tokenizer that runs apart; ``start`` makes one."""

    def __init__(self, process: subprocess.Popen[bytes], checkpoint: Callable[[], None], pointer: str) -> None:
        self._process = process
        self._checkpoint = checkpoint
        self._pointer = pointer
        self._limit_bytes = 0
        self.mask_id: int | None = None
        """The mask token's id; None if there is none."""

    @classmethod
    @contextlib.contextmanager
    def start(
        cls,
        path: ReadableFile,
        settings: Mapping[str, Any],
        largest_text_bytes: int,
        checkpoint: Callable[[], None],
        pointer: str,
    ) -> "Iterator[TokenizerProcess]":
        """Start the process, which reads the file, and end it at last."""
        limit = min(
            _MOST_BYTES,
            _OWN_BYTES + _BYTES_PER_FILE_BYTE * path.stat().st_size + _BYTES_PER_TEXT_BYTE * largest_text_bytes,
        )
        environment = {name: os.environ[name] for name in _PASSED if name in os.environ}
        # one arena, as each thread's own would count as memory; no traces of Rust in a job's log
        environment |= {"MALLOC_ARENA_MAX": "1", "RUST_BACKTRACE": "0", "TOKENIZERS_PARALLELISM": "false"}
        with path.open("rb") as file:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module, no shell
                (*_PROGRAM, "--file", str(file.fileno()), "--bytes", str(limit), "--parent", str(os.getpid())),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[file.fileno()],
                env=environment,
            )
        try:
            tokenizer = cls(process, checkpoint, pointer)
            tokenizer._limit_bytes = limit
            tokenizer.mask_id = tokenizer._asked(dict(settings), "cannot be read")["mask"]
            yield tokenizer
        finally:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()

    def encode(self, texts: Sequence[str | tuple[str, str]], first: int) -> list[Tokens]:
        """Return the tokens of texts."""
        last = first + len(texts) - 1
        which = f"text {first}" if last == first else f"texts {first} to {last}"
        return [Tokens(*each) for each in self._asked(list(texts), f"fails on {which}")]

    def encode_words(self, texts: Sequence[Sequence[str]], first: int) -> "list[WordTokens]":
        """Return the tokens of texts that come as words."""
        message = {"words": [list(words) for words in texts]}
        what = f"fails on the words of texts {first} to {first + len(texts) - 1}"
        return [WordTokens(*each) for each in self._asked(message, what)]

    def _asked(self, message: object, what: str) -> Any:  # noqa: ANN401 - each message has its own reply
        content = json.dumps(message).encode()
        deadline = time.monotonic() + _SECONDS
        assert self._process.stdin is not None  # noqa: S101 - a pipe was asked for
        try:
            self._process.stdin.write(len(content).to_bytes(8, "little") + content)
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended(what) from error
        size = int.from_bytes(self._read(8, deadline, what), "little")
        if size > _MOST_REPLY_BYTES:
            raise self._refused(what, f"it gives {size:,} bytes of tokens")
        reply = json.loads(self._read(size, deadline, what))
        if isinstance(reply, dict) and "error" in reply:
            raise self._refused(what, reply["error"])
        return reply

    def _read(self, size: int, deadline: float, what: str) -> bytes:
        assert self._process.stdout is not None  # noqa: S101 - a pipe was asked for
        descriptor = self._process.stdout.fileno()
        parts: list[bytes] = []
        while size > 0:
            self._checkpoint()
            if time.monotonic() > deadline:
                raise self._refused(what, f"it takes more than {_SECONDS:g} s")
            if not select.select([descriptor], [], [], _LOOK_SECONDS)[0]:
                continue
            part = os.read(descriptor, min(size, 2**20))
            if not part:
                raise self._ended(what)
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _ended(self, what: str) -> Refusal:
        code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return self._refused(
            what, f"its process ended ({how}), as it does when it needs more than {self._limit_bytes // 2**20:,} MiB"
        )

    def _refused(self, what: str, why: str) -> Refusal:
        return Refusal(
            f"tokenizer.json {what}: {why}; take the tokenizer that belongs to the model",
            pointer=self._pointer,
            code="broken_tokenizer",
        )
