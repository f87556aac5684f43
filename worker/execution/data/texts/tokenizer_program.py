"""The tokenizer process: reads a tokenizer.json within limits of the kernel, and tokenises what it is sent.

python -P -m worker.execution.data.texts.tokenizer_program --file FD …
"""

import os
import resource
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from worker.execution.data.apart.program import end, enter_limits, serve

_NORMALISER = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
_MARKS = ("Ġ", "▁")
"""Characters that a space before a word becomes."""


def main() -> int:
    """Serve messages until the standard input ends."""
    start = enter_limits(resource.RLIMIT_AS)
    tokenizer = _Tokenizer(start.descriptor)
    return serve(tokenizer.open, tokenizer.encode, start.memory_bytes)


class _Tokenizer:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._tokenizer: Any = None
        self._disputed: dict[str, str] = {}

    def open(self, message: Any) -> Any:  # noqa: ANN401 - decoded from JSON
        with os.fdopen(self._descriptor, "rb") as file:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(file.read())
        own = (self._tokenizer.truncation or {}).get("direction", "right")
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        claims = message.get("claims") or {}
        said = _contradiction(self._tokenizer, claims)
        if said is not None:
            return {"contradiction": said, "text": None}
        self._disputed = _disputed_tokens(self._tokenizer, claims.get("tokens") or ())
        self._tokenizer.encode_special_tokens = bool(claims.get("split"))
        self._tokenizer.enable_truncation(message["length"], direction=message.get("side") or own)
        known = (self._tokenizer.token_to_id(token) for token in message["masks"])
        return {
            "mask": next((token for token in known if token is not None), None),
            "special": self._tokenizer.num_special_tokens_to_add(bool(message.get("pairs"))),
        }

    def encode(self, message: Any) -> Any:  # noqa: ANN401 - decoded from JSON
        texts = message["words"] if isinstance(message, dict) else message
        for number, text in enumerate(texts if self._disputed else ()):
            said = self._dispute([text] if isinstance(text, str) else text)
            if said is not None:
                return {"contradiction": said, "text": number}
        if isinstance(message, dict):
            return self._encode_words(texts)
        texts = [text if isinstance(text, str) else tuple(text) for text in texts]
        return [
            (encoding.ids, encoding.special_tokens_mask, encoding.type_ids, bool(encoding.overflowing))
            for encoding in self._tokenizer.encode_batch(texts)
        ]

    def _dispute(self, parts: Iterable[str]) -> str | None:
        """Return what is said of a disputed token that a text holds; None where it holds none."""
        for part in parts:
            forms = (part, _normalised(self._tokenizer, part))
            for token, said in self._disputed.items():
                if token in forms[0] or _normalised(self._tokenizer, token) in forms[1]:
                    return f"it holds {token!r:.80}, and {said}"
        return None

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


def _contradiction(tokenizer: Any, claims: Mapping[str, Any]) -> str | None:  # noqa: ANN401 - untyped library
    """Return the first field that the file contradicts, with who says so; None where they agree."""
    fields = claims.get("fields") or {}
    for name, own in _own_fields(tokenizer, fields).items():
        value, said = fields[name]
        # accents are stripped with the case where nothing is said of them
        lowers = name == "strip_accents" and tokenizer.normalizer.lowercase
        if (lowers if value is None else value) != (lowers if own is None else own):
            return f"{said}, and tokenizer.json has {own}"
    frame = {name: token for name, token in (claims.get("frame") or {}).items() if token is not None}
    around = tokenizer.encode("").tokens
    model = tokenizer.model
    own_frame = {"cls_token": around[0], "sep_token": around[-1]} if around else {}
    if isinstance(model, tokenizers.models.WordPiece):
        own_frame["unk_token"] = model.unk_token
    for name, token in own_frame.items():
        if frame.get(name, token) != token:
            return f"its `{name}` is {frame[name]!r:.80} beside tokenizer.json, which has {token!r:.80} in its place"
    return None


def _own_fields(tokenizer: Any, fields: Mapping[str, Any]) -> dict[str, bool | None]:  # noqa: ANN401 - as above
    """Return what the file has for each field that is given and that it can have."""
    found: dict[str, bool | None] = {
        name: getattr(tokenizer.normalizer, attribute)
        for name, attribute in _NORMALISER.items()
        if name in fields and hasattr(tokenizer.normalizer, attribute)
    }
    spaced = _space_before(tokenizer) if "add_prefix_space" in fields else None
    return found if spaced is None else found | {"add_prefix_space": spaced}


def _space_before(tokenizer: Any) -> bool | None:  # noqa: ANN401 - as above
    """Return whether a text's first word is tokenised as one after a space; None where spaces leave no mark."""
    bare, spaced = (_first_piece(tokenizer, text)[:1] for text in ("a", " a"))
    return bare in _MARKS if spaced in _MARKS else None


def _first_piece(tokenizer: Any, text: str) -> str:  # noqa: ANN401 - as above
    text, splitter = _normalised(tokenizer, text), tokenizer.pre_tokenizer
    pieces = [(text, None)] if splitter is None else splitter.pre_tokenize_str(text)
    return str(pieces[0][0]) if pieces else ""


def _normalised(tokenizer: Any, text: str) -> str:  # noqa: ANN401 - as above
    return text if tokenizer.normalizer is None else str(tokenizer.normalizer.normalize_str(text))


def _disputed_tokens(tokenizer: Any, claimed: Iterable[Sequence[Any]]) -> dict[str, str]:  # noqa: ANN401 - as above
    """Return the tokens that are claimed and that the file has not, or otherwise, each with what is said of it."""
    own = {token.content: (number, token) for number, token in tokenizer.get_added_tokens_decoder().items()}
    found: dict[str, str] = {}
    for content, number, flags, place in claimed:
        if content not in own:
            found.setdefault(
                content, f"{place} has this as a token, and tokenizer.json does not list it in `added_tokens`"
            )
            continue
        other = [name for name, on in (flags or {}).items() if getattr(own[content][1], name) != on]
        if number is not None and number != own[content][0]:
            found.setdefault(content, f"{place} has it as token {number}, and tokenizer.json as {own[content][0]}")
        elif other:
            found.setdefault(
                content, f"{place} has this token with `{other[0]}: {flags[other[0]]}`, unlike tokenizer.json"
            )
    return found


if __name__ == "__main__":
    end(main())
