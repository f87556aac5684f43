"""A process of its own for a tokenizer.json, which is foreign: it may take any memory and time, or crash.

Rust's panics are no ``Exception``, some abort the process, and a normaliser can turn a page into gigabytes. So the
library runs apart, bounded by the kernel and by a clock, and whatever ends it is the fault of the file::

    parent                                    tokenizer process
    {"length": …, "masks": …}    ──────────>  limits its memory, reads the file
                                 <──────────  {"mask": id or null, "special": …}, or {"error": "…"}
    ["text", ["one", "other"], …] ─────────>
                                 <──────────  [[ids, special, types, cut], …], or {"error": "…"}
    {"words": [["word", …], …]}  ──────────>
                                 <──────────  [[ids, words, cut], …], or {"error": "…"}

Each reply is {"contradiction": "…", "text": n or null} instead where the files beside ``tokenizer.json`` say otherwise.

The library does not cut to a length below the number of special tokens, and says nothing. So such a length is refused,
and the length of each reply is compared with it.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from worker.execution.data.apart.apart_process import ApartFault, ApartProcess, Limits
from worker.execution.files.open_files import ReadableFile
from worker.execution.loaded_model import Vocabulary
from worker.execution.refusal import Refusal, storable_text

_PROGRAM = "worker.execution.data.texts.tokenizer_program"
# no traces of Rust in a job's log
_ENVIRONMENT = {"RUST_BACKTRACE": "0", "TOKENIZERS_PARALLELISM": "false"}
_SECONDS = 120.0
"""For one message of at most 1 MiB of text, on a machine that is busy with other things."""
_OWN_BYTES = 512 * 2**20
_BYTES_PER_FILE_BYTE = 32
_BYTES_PER_TEXT_BYTE = 512
"""Each token holds its text, offsets and masks; a tokenizer of characters makes one of every byte."""
_MOST_BYTES = 4 * 2**30
_MOST_REPLY_BYTES = 2**30


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


def tokenizer_settings(
    vocabulary: Vocabulary, length: int, masks: Sequence[str], *, pairs: bool = False
) -> dict[str, Any]:
    """Return what a tokenizer is started with; ``pairs`` if the texts are pairs."""
    return {
        "length": length,
        "pairs": pairs,
        "masks": list(masks),
        "side": vocabulary.truncation_side,
        "claims": dict(vocabulary.tokenizer_claims),
    }


class TokenizerProcess:
    """A tokenizer that runs apart; ``start`` makes one."""

    def __init__(self, process: ApartProcess, settings: Mapping[str, Any], pointer: str) -> None:
        self._process = process
        self._pointer = pointer
        self._length: int = settings["length"]
        self._pairs = bool(settings.get("pairs"))
        fault = settings.get("claims", {}).get("fault")
        if fault is not None:
            raise Refusal(
                f"{storable_text(fault)}, so it is not known how texts are tokenised; give a sound file, or none",
                pointer=pointer,
                code="broken_tokenizer",
            )
        reply = self._asked(dict(settings), "cannot be read", 0)
        self.mask_id: int | None = reply["mask"]
        """The mask token's id; None if there is none."""
        self._special: int = reply["special"]

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
        limits = Limits(memory_bytes=limit, reply_seconds=_SECONDS, reply_bytes=_MOST_REPLY_BYTES)
        with ApartProcess.start(_PROGRAM, path, limits, checkpoint, _ENVIRONMENT) as process:
            yield cls(process, settings, pointer)

    def require_room(self, asked: int, block: str) -> None:
        """Refuse a length that special tokens fill, so that no token of a text is read.

        Args:
            asked: ``sequence_length`` of the document; the length in force is less where the model has fewer positions.
            block: The block of the document that names the texts.
        """
        if not self._special or self._length > self._special:
            return
        each, least = "pair of texts" if self._pairs else "text", self._special + 1
        added = f"the tokenizer adds {self._special} special tokens to each {each}, and they count"
        if self._length == asked:
            raise Refusal(
                f"`sequence_length` must be at least {least} (got {asked}): {added}; give {least} or more",
                pointer=f"/{block}/sequence_length",
                code="invalid_value",
            )
        raise Refusal(
            f"the model must have at least {least} positions (config.json gives {self._length}): {added}; take the "
            "tokenizer that belongs to the model, or another model",
            pointer=self._pointer,
            code="invalid_value",
        )

    def encode(self, texts: Sequence[str | tuple[str, str]], first: int) -> list[Tokens]:
        """Return the tokens of texts."""
        last = first + len(texts) - 1
        which = f"text {first}" if last == first else f"texts {first} to {last}"
        found = [Tokens(*each) for each in self._asked(list(texts), f"fails on {which}", first)]
        self._require_cut(found, first)
        return found

    def encode_words(self, texts: Sequence[Sequence[str]], first: int) -> "list[WordTokens]":
        """Return the tokens of texts that come as words."""
        message = {"words": [list(words) for words in texts]}
        what = f"fails on the words of texts {first} to {first + len(texts) - 1}"
        found = [WordTokens(*each) for each in self._asked(message, what, first)]
        self._require_cut(found, first)
        return found

    def _require_cut(self, found: Sequence[Tokens | WordTokens], first: int) -> None:
        for place, each in enumerate(found, first):
            if len(each.ids) > self._length:
                raise Refusal(
                    f"tokenizer.json gives {len(each.ids):,} tokens for text {place}, and is to cut it to "
                    f"{self._length:,}; give a larger `sequence_length`, or take the model's own tokenizer",
                    pointer=self._pointer,
                    code="broken_tokenizer",
                )

    def _asked(self, message: object, what: str, first: int) -> Any:  # noqa: ANN401 - each message has its own reply
        try:
            reply = self._process.ask(message)
        except ApartFault as fault:
            raise Refusal(
                f"tokenizer.json {what}: {fault}; take the tokenizer that belongs to the model",
                pointer=self._pointer,
                code="broken_tokenizer",
            ) from fault
        said = reply.get("contradiction") if isinstance(reply, dict) else None
        if said is not None:
            place = "" if reply["text"] is None else f"text {first + reply['text']}: "
            raise Refusal(
                f"{place}{storable_text(said)}; tokenizer.json is what is read here, and `transformers` would give "
                "other tokens: make them agree, for example with `save_pretrained` of the tokenizer that the model was "
                "trained with",
                pointer=self._pointer,
                code="broken_tokenizer",
            )
        return reply
