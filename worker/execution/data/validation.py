"""Validation of every chunk before the model sees it: finite inputs, token ids that the model has.

The engine checks shapes and targets against the model's outputs; what it cannot tell from the
outputs is said here, with the example that is wrong.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.errors import EngineError
from worker.execution.data.stream import Chunk, DataStream
from worker.execution.loaded_model import LoadedModel, Vocabulary
from worker.execution.refusal import Refusal
from worker.execution.resolve import describe_exception


def validate_chunks(stream: DataStream, loaded: LoadedModel, pointer: str) -> DataStream:
    """Return a stream that checks each chunk as it passes."""

    def batches() -> Iterator[Chunk]:
        start = 0
        for chunk in stream.batches():
            _require_chunk(chunk, pointer)
            for name, tensor in _tensors(chunk[0], "inputs"):
                _require_sound(name, tensor, start, pointer)
            for name, tensor in _tensors(chunk[1], "targets"):
                _require_sound(name, tensor, start, pointer)
            if loaded.vocabulary is not None:
                _require_known_tokens(chunk[0], loaded.vocabulary, start, pointer)
            start += _size(chunk[0])
            yield chunk

    return replace(stream, batches=batches)


def iterate_caller_data(make: Callable[[], Any], name: str, pointer: str) -> Iterator[Any]:
    """Iterate over a caller's data; what that code raises is reported as the caller's fault."""
    try:
        yield from make()
    except (Refusal, EngineError):
        raise
    except (Exception, SystemExit) as error:
        raise Refusal(f"`{name}` raised {describe_exception(error)}", pointer=pointer, code="factory_failed") from error


def _require_chunk(chunk: Any, pointer: str) -> None:  # noqa: ANN401 - a caller's code yields anything
    if not isinstance(chunk, (tuple, list)) or len(chunk) not in (2, 3):
        shown = type(chunk).__name__ + (f" of {len(chunk)}" if isinstance(chunk, (tuple, list)) else "")
        raise Refusal(
            f"the data yields {shown}; it must yield (inputs, targets) or (inputs, targets, index)",
            pointer=pointer,
            code="wrong_type",
        )


def _tensors(tree: Any, name: str) -> Iterator[tuple[str, Tensor]]:  # noqa: ANN401
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _tensors(value, f"{name}.{key}")
    elif isinstance(tree, (tuple, list)):
        for place, value in enumerate(tree):
            yield from _tensors(value, f"{name}[{place}]")


def _require_sound(name: str, tensor: Tensor, start: int, pointer: str) -> None:
    if (tensor.is_floating_point() or tensor.is_complex()) and not bool(torch.isfinite(tensor).all()):
        wrong = torch.nonzero(~torch.isfinite(tensor))[0]
        example = start + int(wrong[0]) if wrong.numel() else start
        raise Refusal(
            f"{name} of example {example} hold NaN or Inf; correct or leave out that example",
            pointer=pointer,
            code="non_finite_data",
        )


def _require_known_tokens(inputs: Any, vocabulary: Vocabulary, start: int, pointer: str) -> None:  # noqa: ANN401
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
    if not isinstance(ids, Tensor) or ids.is_floating_point():
        raise Refusal(
            "the model reads token ids (integers); these inputs are none. Give text, int64 ids of shape (N, T), or"
            " synthetic data with a `vocabulary`",
            pointer=pointer,
            code="wrong_dtype",
        )
    if not ids.numel():
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary.size:
        wrong = int(torch.nonzero((ids < 0) | (ids >= vocabulary.size))[0][0])
        raise Refusal(
            f"example {start + wrong} holds token id {low if low < 0 else high}; the model has 0 to "
            f"{vocabulary.size - 1}. Tokenise with the model's own tokenizer",
            pointer=pointer,
            code="unknown_token",
        )
    if vocabulary.max_length is not None and ids.ndim == 2 and ids.shape[1] > vocabulary.max_length:
        raise Refusal(
            f"sequences have {ids.shape[1]} tokens; the model has {vocabulary.max_length} positions. "
            "Give a smaller `sequence_length`",
            pointer=pointer,
            code="wrong_shape",
        )


def _size(inputs: Any) -> int:  # noqa: ANN401
    first = next((tensor for _, tensor in _tensors(inputs, "inputs")), None)
    return int(first.shape[0]) if first is not None and first.ndim else 0
