"""Tagged words: texts that come as words with a class each, as batches of token ids with a target for each token.

A tokenizer makes one or several tokens of a word. The first of them has the word's tag; the others, and the tokens that
the tokenizer adds around a text, have ``task.ignore_index`` and are no loss terms. Which word a token is of is the
tokenizer's own account of it.

====================  ======================================================
a line of a file      ``{"words": ["Ada", "wrote"], "tags": [1, 0]}``
a row of a table      two columns, a list in each
====================  ======================================================
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.execution.data.byte_count import ByteCount
from worker.execution.data.forward_inputs import row_positions
from worker.execution.data.labels import Labels
from worker.execution.data.stream import Chunk, DataRequest, DataStream
from worker.execution.data.texts.text import tell_cut
from worker.execution.data.texts.text_rows import batch_bounds, cut_places, reads_mask, require_text
from worker.execution.data.texts.tokenizer_process import TokenizerProcess, WordTokens, tokenizer_settings
from worker.execution.loaded_model import Vocabulary
from worker.execution.refusal import Refusal

WORDS, TAGS = "words", "tags"
"""Fields of a line."""
_AT_ONCE = 128
_MOST_WORDS = 2**16
"""Most words of one text."""
_TEXT_BYTES = 500
"""Two tensors of one text beside their numbers."""


@dataclass(frozen=True, kw_only=True)
class TaggedWords:
    """One text."""

    words: tuple[str, ...]
    tags: tuple[int, ...]
    """A class for each word, or ``ignore_index``."""


@dataclass(frozen=True, kw_only=True)
class _Encoded:
    ids: Tensor
    """(T,) int64."""
    targets: Tensor
    """(T,) int64."""
    place: int
    """Its number among the texts given: the key of its sampled labels."""


def read_tagged_words(
    row: Mapping[str, Any], fields: tuple[str, str], where: str, labels: Labels, count: ByteCount
) -> tuple[str, ...]:
    """Read the words of one text of a file; its tags go to the labels of all texts."""
    pointer = labels.pointer
    words: Any
    tags: Any
    words, tags = (row.get(name) for name in fields)
    for name, value in zip(fields, (words, tags), strict=True):
        if not isinstance(value, list) or not 1 <= len(value) <= _MOST_WORDS:
            raise Refusal(
                f"{where}: `{name}` must be a list of 1 to {_MOST_WORDS:,} entries, one for each word "
                f"(got {'none' if value is None else type(value).__name__})",
                pointer=pointer,
                code="wrong_format",
            )
    if len(words) != len(tags):
        raise Refusal(
            f"{where}: `{fields[0]}` has {len(words)} entries and `{fields[1]}` {len(tags)}; give a tag for each word",
            pointer=pointer,
            code="ragged",
        )
    for word, tag in zip(words, tags, strict=True):
        count.add_value(require_text(word, fields[0], where, pointer))
        count.add_value(tag)
        labels.add(tag, where)
    return tuple(words)


def tag_words(texts: Sequence[tuple[str, ...]], labels: Labels) -> list[TaggedWords]:
    """Give each word its tag, once the tags of all texts are known."""
    tags = map(int, labels.numbers())
    return [TaggedWords(words=words, tags=tuple(itertools.islice(tags, len(words)))) for words in texts]


def tagged_stream(texts: Sequence[TaggedWords], length: int, request: DataRequest, pointer: str) -> DataStream:
    """Tokenise texts of tagged words with the model's own tokenizer."""
    vocabulary = request.loaded.vocabulary
    if vocabulary is None or vocabulary.tokenizer is None:
        raise Refusal(
            "these are texts, but the model has no tokenizer.json; add it to its folder, or give `input_ids`, "
            "`attention_mask` and `targets` as tensors",
            pointer=pointer,
            code="no_tokenizer",
        )
    asked, length = length, length if vocabulary.max_length is None else min(length, vocabulary.max_length)
    count = request.context.byte_count(pointer)
    encoded: list[_Encoded] = []
    cut = 0
    largest = max(sum(len(word.encode()) + 1 for word in text.words) for text in texts)
    with TokenizerProcess.start(
        vocabulary.tokenizer, tokenizer_settings(vocabulary, length, ()), largest, request.context.checkpoint, pointer
    ) as tokenizer:
        tokenizer.require_room(asked, request.block)
        for start in range(0, len(texts), _AT_ONCE):
            request.context.checkpoint()
            some = texts[start : start + _AT_ONCE]
            for place, found in enumerate(tokenizer.encode_words([text.words for text in some], start), start):
                own = _aligned(texts[place], found, place, request.task.ignore_index)
                _require_known_ids(own, vocabulary, pointer)
                count.add(own.ids.nbytes + own.targets.nbytes + _TEXT_BYTES)
                cut += found.cut
                encoded.append(own)
            request.context.report("data", start + len(some), len(texts), "texts")
    if not any(bool((text.targets != request.task.ignore_index).any()) for text in encoded):
        raise Refusal(
            f"no word of the {len(texts)} texts has a tag that counts; give tags other than "
            f"{request.task.ignore_index}, the one that is ignored",
            pointer=pointer,
            code="no_targets",
        )
    tell_cut(cut, len(texts), length, asked, request)

    lengths = [len(text.ids) for text in encoded]

    def batches() -> Iterator[Chunk]:
        for own in batch_bounds(lengths, request.batch_size, vocabulary):
            yield _batch(encoded[own], vocabulary, request.task.ignore_index)

    return DataStream(
        batches=batches,
        # where batches are cut short, they do not begin at multiples of their size
        examples=None if cut_places(lengths, vocabulary) else len(encoded),
        labels=lambda: ((chunk[1], chunk[2]) for chunk in batches()),
    )


def _aligned(text: TaggedWords, found: WordTokens, place: int, ignored: int) -> _Encoded:
    """Give the first token of each word the word's tag."""
    before = [None, *found.words[:-1]]
    targets = [
        text.tags[word] if word is not None and word != previous else ignored
        for word, previous in zip(found.words, before, strict=True)
    ]
    return _Encoded(
        ids=torch.tensor(found.ids, dtype=torch.int64), targets=torch.tensor(targets, dtype=torch.int64), place=place
    )


def _require_known_ids(text: _Encoded, vocabulary: Vocabulary, pointer: str) -> None:
    highest = int(text.ids.max()) if len(text.ids) else 0
    if highest >= vocabulary.size or not len(text.ids):
        what = f"token id {highest}" if len(text.ids) else "no token"
        raise Refusal(
            f"the tokenizer gives {what} in text {text.place}, but the model's embedding has {vocabulary.size} rows "
            f"(ids 0 to {vocabulary.size - 1}); take the model's own tokenizer, and leave out empty texts",
            pointer=pointer,
            code="unknown_token",
        )


def _batch(texts: Sequence[_Encoded], vocabulary: Vocabulary, ignored: int) -> Chunk:
    shape = (len(texts), max(len(text.ids) for text in texts))
    ids = torch.full(shape, vocabulary.pad_id, dtype=torch.int64)
    targets = torch.full(shape, ignored, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text.ids)] = text.ids
        targets[row, : len(text.ids)] = text.targets
        mask[row, : len(text.ids)] = 1
    places = torch.tensor([text.place for text in texts], dtype=torch.int64)
    inputs = {"input_ids": ids, "attention_mask": mask} if reads_mask(vocabulary) else {"input_ids": ids}
    if vocabulary.explicit_positions:
        inputs["position_ids"] = row_positions(ids)
    return inputs, targets, places
