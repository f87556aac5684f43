"""The tokenizer process: reads a tokenizer.json within limits of the kernel, and tokenises what it is sent.

python -P -m worker.execution.data.texts.tokenizer_program --file FD …
"""

import os
import resource
from typing import Any

import tokenizers

from worker.execution.data.apart.program import end, enter_limits, serve

_NORMALISER = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}


def main() -> int:
    """Serve messages until the standard input ends."""
    start = enter_limits(resource.RLIMIT_AS)
    tokenizer = _Tokenizer(start.descriptor)
    return serve(tokenizer.open, tokenizer.encode, start.memory_bytes)


class _Tokenizer:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._tokenizer: Any = None

    def open(self, message: Any) -> Any:  # noqa: ANN401 - decoded from JSON
        with os.fdopen(self._descriptor, "rb") as file:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(file.read())
        fault = self._contradiction(message.get("normaliser") or {})
        if fault is not None:
            raise ValueError(fault)
        own = (self._tokenizer.truncation or {}).get("direction", "right")
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(message["length"], direction=message.get("side") or own)
        known = (self._tokenizer.token_to_id(token) for token in message["masks"])
        return {
            "mask": next((token for token in known if token is not None), None),
            "special": self._tokenizer.num_special_tokens_to_add(bool(message.get("pairs"))),
        }

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


if __name__ == "__main__":
    end(main())
