"""The tokenizer process: reads a tokenizer.json within limits of the kernel, and tokenises what it is sent.

python -P -m worker.execution.data.texts.tokenizer_program --file FD --bytes LIMIT --parent PID
"""

import argparse
import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

import tokenizers

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_NORMALISER = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
_MOST_MESSAGE_CHARACTERS = 300


def main() -> int:
    """Serve messages until the standard input ends."""
    parser = argparse.ArgumentParser(prog="tokenizer_program", description="Tokenise; started by the child of a job.")
    parser.add_argument("--file", type=int, required=True, help="descriptor of the tokenizer.json")
    parser.add_argument("--bytes", type=int, required=True, help="most bytes of address space")
    parser.add_argument("--parent", type=int, required=True, help="the process that it ends with")
    arguments = parser.parse_args()
    _end_with_parent()
    if os.getppid() != arguments.parent:
        return 1
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        most = arguments.bytes if hard == resource.RLIM_INFINITY else min(hard, arguments.bytes)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # what the library prints is not a message
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    tokenizer = _Tokenizer(arguments.file)
    answer = tokenizer.open
    while (message := _message(sys.stdin.buffer)) is not None:
        content = json.dumps(_answered(answer, message)).encode()
        replies.write(len(content).to_bytes(8, "little") + content)
        replies.flush()
        answer = tokenizer.encode
    return 0


class _Tokenizer:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._tokenizer: Any = None

    def open(self, message: Any) -> Any:  # noqa: ANN401 - decoded from JSON
        with os.fdopen(self._descriptor, "rb") as file:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(file.read())
        fault = self._contradiction(message.get("normaliser") or {})
        if fault is not None:
            return {"error": fault}
        own = (self._tokenizer.truncation or {}).get("direction", "right")
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(message["length"], direction=message.get("side") or own)
        known = (self._tokenizer.token_to_id(token) for token in message["masks"])
        return {"mask": next((token for token in known if token is not None), None)}

    def _contradiction(self, said: dict[str, bool | None]) -> str | None:
        """Return the disagreement of tokenizer_config.json and the file's normaliser; None where they agree."""
        for name, value in said.items():
            own = getattr(self._tokenizer.normalizer, _NORMALISER[name], value)
            if own != value:
                return f"tokenizer_config.json says `{name}: {value}`, and it has {own}, so make them agree"
        return None

    def encode(self, message: Any) -> Any:  # noqa: ANN401 - decoded from JSON
        if isinstance(message, dict):
            return self._encode_words(message["words"])
        texts = [text if isinstance(text, str) else tuple(text) for text in message]
        return [
            (encoding.ids, encoding.special_tokens_mask, encoding.type_ids, bool(encoding.overflowing))
            for encoding in self._tokenizer.encode_batch(texts)
        ]

    def _encode_words(self, texts: list[list[str]]) -> Any:  # noqa: ANN401 - goes into JSON
        splitter = self._tokenizer.pre_tokenizer
        if isinstance(splitter, tokenizers.pre_tokenizers.ByteLevel) and not splitter.add_prefix_space:
            # a word by itself is one after a space, as transformers has it for words
            splitter.add_prefix_space = True
            self._tokenizer.pre_tokenizer = splitter
        return [
            (encoding.ids, encoding.word_ids, bool(encoding.overflowing))
            for encoding in self._tokenizer.encode_batch(texts, is_pretokenized=True)
        ]


def _answered(answer: Callable[[Any], Any], message: Any) -> Any:  # noqa: ANN401 - decoded from JSON
    try:
        return answer(message)
    except MemoryError:
        return {"error": "it needs more memory than such a file should"}
    except BaseException as error:  # noqa: BLE001 - a panic of Rust is not an Exception
        return {"error": str(error)[:_MOST_MESSAGE_CHARACTERS] or type(error).__name__}


def _message(stream: BinaryIO) -> Any:  # noqa: ANN401 - decoded from JSON
    size = stream.read(8)
    return json.loads(stream.read(int.from_bytes(size, "little"))) if len(size) == 8 else None


def _end_with_parent() -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # nothing of the library has a say in how this ends
    os._exit(code)
