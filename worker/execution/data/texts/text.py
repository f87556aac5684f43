"""Texts as batches of token ids: cut, padded to the longest of each batch, with what the task needs.

Masking for ``masked_lm`` is keyed by (seed, example, position), so the same tokens are masked
whatever the batch size. A masked token is always shown as the mask token (BERT's recipe also shows
a tenth unchanged and a tenth replaced; what is measured here is the plain prediction).
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.counter_rng import uniforms
from worker.execution.data.forward_inputs import row_positions
from worker.execution.data.stream import Chunk, DataRequest, DataStream
from worker.execution.data.texts.text_rows import LABELLED, batch_bounds, cut_places, reads_mask
from worker.execution.data.texts.tokenizer_process import TokenizerProcess, tokenizer_settings
from worker.execution.loaded_model import Vocabulary
from worker.execution.refusal import Refusal, is_storable

_MASKED_SHARE = 0.15
_MASKING = 0x6D61736B
"""Last part of the draw's key: sampled labels have the same seed and example, and must not follow it."""
_TEXT_BYTES = 500
"""Two tensors of one text beside their numbers."""
_AT_ONCE = 512
Text = str | tuple[str, str]
"""A text, or a pair of them."""
_CHARACTERS_AT_ONCE = 2**18


@dataclass(frozen=True, kw_only=True)
class _Encoded:
    """One text."""

    ids: Tensor
    """(T,) int64."""
    special: Tensor
    """(T,) booleans: tokens that the tokenizer added."""
    types: Tensor | None
    """(T,) int64: 1 for the tokens of the other half of a pair; None where all are 0."""
    cut: bool
    """Whether it was longer."""
    place: int
    """Its number among the texts given: the key of its masking and of its sampled labels."""


def text_stream(
    texts: Sequence[Text], labels: Sequence[float] | None, length: int, request: DataRequest, pointer: str
) -> DataStream:
    """Tokenise texts with the model's own tokenizer."""
    vocabulary = request.loaded.vocabulary
    if vocabulary is None:
        raise Refusal("these are texts, but the model reads no tokens; give tensors", pointer=pointer)
    if labels is None and request.task.type in LABELLED:
        raise Refusal(
            f"`{request.task.type}` needs a label for every text, and there is none; give lines of JSON "
            "(`.jsonl`) that have a `label`",
            pointer=pointer,
            code="no_targets",
        )
    asked, length = length, length if vocabulary.max_length is None else min(length, vocabulary.max_length)
    least = 2 if request.task.type == "causal_lm" else 1
    with _open_tokenizer(texts, vocabulary, length, request, pointer) as tokenizer:
        if tokenizer is not None:
            tokenizer.require_room(asked, request.block)
        mask_id = _mask_id(tokenizer) if request.task.type == "masked_lm" else None
        count = request.context.byte_count(pointer)
        encoded, cut = [], 0
        for text in _encode(texts, tokenizer, length, request):
            _require_known_ids(text, vocabulary, pointer)
            count.add(text.ids.nbytes + text.special.nbytes + _TEXT_BYTES)
            cut += text.cut
            if len(text.ids) >= least:
                encoded.append(text)
    if not encoded:
        raise Refusal(
            f"none of the {len(texts)} texts has {least} tokens or more; give text", pointer=pointer, code="empty_data"
        )
    if len(encoded) < len(texts):
        request.context.notice(
            f"{len(texts) - len(encoded)} of {len(texts)} texts have fewer than {least} tokens and are left out"
        )
    tell_cut(cut, len(texts), length, asked, request)
    vocabulary = _with_padding(encoded, vocabulary, request, pointer)

    lengths = [len(text.ids) for text in encoded]

    def batches() -> Iterator[Chunk]:
        for own in batch_bounds(lengths, request.batch_size, vocabulary):
            yield _batch(encoded[own], given, vocabulary, mask_id, request)

    places = torch.tensor([text.place for text in encoded], dtype=torch.int64)
    given = None if labels is None or request.task.type not in LABELLED else _targets(labels, request)
    return DataStream(
        batches=batches,
        # where batches are cut short, they do not begin at multiples of their size
        examples=None if cut_places(lengths, vocabulary) else len(encoded),
        labels=None if given is None else lambda: iter([(given[places], places)]),
        text_of=(lambda place: _joined(texts[encoded[place].place], " ")) if request.texts else None,
    )


def tell_cut(cut: int, count: int, length: int, asked: int, request: DataRequest) -> None:
    """Say how many texts were longer than what is read of them."""
    if cut:
        why = "the model has no more positions" if length < asked else "`sequence_length`, which can be raised"
        request.context.notice(f"{cut} of {count} texts are longer than {length} tokens and are cut there: {why}")


def _with_padding(texts: Sequence[_Encoded], vocabulary: Vocabulary, request: DataRequest, pointer: str) -> Vocabulary:
    """Choose a padding that ends no text, where the model names none and its head looks for the last token.

    The head takes the last token that is not padding: of a text that ends with it, the one before.
    """
    if vocabulary.pad_with is None or request.task.type not in LABELLED:
        return vocabulary
    last = {int(text.ids[-1]) for text in texts}
    pad_id = next((each for each in (vocabulary.pad_id, *range(vocabulary.size)) if each not in last), None)
    if pad_id is None:
        raise Refusal(
            f"config.json names no `pad_token_id`, and each of the {vocabulary.size} tokens ends a text, so that none "
            "can be padding; name one there",
            pointer=pointer,
            code="no_padding",
        )
    vocabulary.pad_with(pad_id)
    return dataclasses.replace(vocabulary, pad_id=pad_id)


def _targets(labels: Sequence[float], request: DataRequest) -> Tensor:
    """Return the labels (N,) as int64; of a regression as float32, or float64 where that would round one of them."""
    if request.task.type != "regression":
        return torch.tensor(labels, dtype=torch.int64)
    wide = torch.tensor(labels, dtype=torch.float64)
    return wide.float() if torch.equal(wide.float().double(), wide) else wide


@contextlib.contextmanager
def _open_tokenizer(
    texts: Sequence[Text], vocabulary: Vocabulary, length: int, request: DataRequest, pointer: str
) -> Iterator[TokenizerProcess | None]:
    """Open the model's tokenizer; None for a model that reads bytes."""
    if vocabulary.tokenizer is None:
        if vocabulary.arguments:
            raise Refusal(
                "the model's folder has no tokenizer.json, so texts cannot be read; add it, or give token ids",
                pointer=pointer,
                code="no_tokenizer",
            )
        if any(not isinstance(text, str) for text in texts):
            raise Refusal(
                "these are pairs of texts, and the model has no tokenizer that could join them; give single texts",
                pointer=pointer,
                code="no_tokenizer",
            )
        yield None
        return
    known = (vocabulary.mask_token, "[MASK]", "<mask>")
    masks = [token for token in known if token is not None and is_storable(token)]
    pairs = any(not isinstance(text, str) for text in texts)
    with TokenizerProcess.start(
        vocabulary.tokenizer,
        tokenizer_settings(vocabulary, length, masks, pairs=pairs),
        # no character takes more than 4 bytes
        max(len(text) if text.isascii() else 4 * len(text) for text in map(_joined, texts)),
        request.context.checkpoint,
        pointer,
    ) as tokenizer:
        yield tokenizer


def _encode(
    texts: Sequence[Text], tokenizer: TokenizerProcess | None, length: int, request: DataRequest
) -> Iterator[_Encoded]:
    start = 0
    while start < len(texts):
        request.context.checkpoint()
        some = _next_texts(texts, start)
        if tokenizer is None:
            for place, text in enumerate(some, start):
                own = _joined(text).encode()
                ids = torch.tensor(list(own[:length]), dtype=torch.int64)
                special = torch.zeros(len(ids), dtype=torch.bool)
                yield _Encoded(ids=ids, special=special, types=None, cut=len(own) > length, place=place)
        else:
            for place, found in enumerate(tokenizer.encode(some, start), start):
                yield _Encoded(
                    ids=torch.tensor(found.ids, dtype=torch.int64),
                    special=torch.tensor(found.special, dtype=torch.bool),
                    types=torch.tensor(found.types, dtype=torch.int64) if any(found.types) else None,
                    cut=found.cut,
                    place=place,
                )
        start += len(some)
        request.context.report("data", start, len(texts), "texts")


def _joined(text: Text, between: str = "") -> str:
    return text if isinstance(text, str) else between.join(text)


def _next_texts(texts: Sequence[Text], start: int) -> Sequence[Text]:
    """Return texts of one message: at most 512, and of 1 MiB together unless one alone has more."""
    characters = 0
    for count, text in enumerate(texts[start : start + _AT_ONCE]):
        characters += len(_joined(text))
        if count and characters > _CHARACTERS_AT_ONCE:
            return texts[start : start + count]
    return texts[start : start + _AT_ONCE]


def _require_known_ids(text: _Encoded, vocabulary: Vocabulary, pointer: str) -> None:
    """Refuse a tokenizer that gives ids without a row in the model's embedding."""
    highest = int(text.ids.max()) if len(text.ids) else 0
    if highest >= vocabulary.size:
        raise Refusal(
            f"the tokenizer gives token id {highest} in text {text.place}, but the model's embedding has "
            f"{vocabulary.size} rows (ids 0 to {vocabulary.size - 1}); take the tokenizer that belongs to the model",
            pointer=pointer,
            code="unknown_token",
        )
    types = 0 if text.types is None else int(text.types.max())
    if vocabulary.token_types and types >= vocabulary.token_types:
        raise Refusal(
            f"the tokenizer marks a token of text {text.place} as of text {types} of a pair, but the model knows "
            f"{vocabulary.token_types} (`type_vocab_size`); take a model of pairs, or give single texts",
            pointer=pointer,
            code="unknown_token",
        )


def _mask_id(tokenizer: TokenizerProcess | None) -> int:
    if tokenizer is None or tokenizer.mask_id is None:
        raise Refusal(
            "the model's tokenizer has no mask token, which `masked_lm` needs; take `causal_lm`, or another model",
            pointer="/task/type",
        )
    return tokenizer.mask_id


def _batch(
    texts: Sequence[_Encoded],
    labels: Tensor | None,
    vocabulary: Vocabulary,
    mask_id: int | None,
    request: DataRequest,
) -> Chunk:
    task = request.task
    longest = max(len(text.ids) for text in texts)
    ids = torch.full((len(texts), longest), vocabulary.pad_id, dtype=torch.int64)
    mask = torch.zeros((len(texts), longest), dtype=torch.int64)
    places = torch.tensor([text.place for text in texts], dtype=torch.int64)
    targets: Tensor | None = None
    for row, text in enumerate(texts):
        own = slice(longest - len(text.ids), longest) if vocabulary.pads_left else slice(len(text.ids))
        ids[row, own] = text.ids
        mask[row, own] = 1
    if task.type == "causal_lm":
        targets = torch.where(mask.bool(), ids, task.ignore_index)
    elif mask_id is not None:
        targets = torch.full_like(ids, task.ignore_index)
        for row, text in enumerate(texts):
            chosen = _masked_positions(text, request.seed)
            targets[row, chosen] = ids[row, chosen]
            ids[row, chosen] = mask_id
    elif labels is not None:
        targets = labels[places]
    if not vocabulary.arguments:
        return ids, targets, places
    inputs = {"input_ids": ids, "attention_mask": mask} if reads_mask(vocabulary) else {"input_ids": ids}
    if vocabulary.token_types and any(text.types is not None for text in texts):
        inputs["token_type_ids"] = _token_types(texts, ids)
    if vocabulary.explicit_positions:
        inputs["position_ids"] = row_positions(ids)
    return inputs, targets, places


def _token_types(texts: Sequence[_Encoded], ids: Tensor) -> Tensor:
    """Which half of its pair each token (n, T) is of; 0 where there is padding."""
    types = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        if text.types is not None:
            types[row, : len(text.types)] = text.types
    return types


def _masked_positions(text: _Encoded, seed: int) -> Tensor:
    """Positions (k,) to mask: each real token with probability 0.15, and at least one."""
    real = torch.nonzero(~text.special).flatten()
    if not real.numel():
        return real
    draws = uniforms(seed, text.place, real, _MASKING)
    chosen = draws < _MASKED_SHARE
    return real[chosen] if bool(chosen.any()) else real[draws.argmin()].reshape(1)
