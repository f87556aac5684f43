"""Examples as people hold them, read as the chunks ``(inputs, targets)`` that ``engine.model.batches`` takes.

=========================================  ===========================================================
what is given                              how it is read
=========================================  ===========================================================
an iterable of tuples                      each is a chunk
an iterable of mappings (a ``DataLoader``) each is a chunk; ``labels`` (or its like) are the targets
a PyTorch ``Dataset``, by items or iterated each item is one example; examples are put together later
one pair ``(x, y)`` of tensors             one chunk
=========================================  ===========================================================

Arrays count as tensors everywhere, and a list of numbers does as targets: floats are float64, as Python has them.
Refused are tensors that cannot be cut by example, and arrays with numbers that are masked.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from catalog.requests.data_sources import Pixels
from engine.errors import WrongShape

TARGET_NAMES = ("labels", "label", "targets", "target")
"""Entries of a mapping that are its targets, the first one there."""
_INPUT_NAMES = ("inputs", "input")


def is_single_chunk(data: object) -> TypeGuard[tuple[Any, ...]]:
    """Return whether data are one chunk rather than a series of them."""
    return (
        isinstance(data, (tuple, list))
        and len(data) in (2, 3)
        and _is_tensor(data[1])
        and (_is_tensor(data[0]) or _is_mapping_of_tensors(data[0]))
    )


def read_chunks(data: Any) -> Iterator[Any]:  # noqa: ANN401 - a caller's own
    """Read data as chunks.

    Args:
        data: As the module's table says; examples on dimension 0 of every tensor, except of a dataset's items.

    Yields:
        Tuples ``(inputs, targets)`` or ``(inputs, targets, index)``; what is neither tuple nor mapping as it is, for
        ``make_batches`` to refuse.

    Raises:
        WrongShape: If a mapping has no targets, an item of a dataset cannot be made a tensor, a tensor is nested,
            sparse or quantized, or a number of an array is masked.
    """
    if is_single_chunk(data):
        yield _as_tensors(data)
    elif isinstance(data, Dataset) or _is_map_style(data):
        for place, item in enumerate(_items(data)):
            yield _chunk_of_one(item, place)
    else:
        for item in data:
            yield _as_tensors(_pair(item) if isinstance(item, Mapping) else item)


def scale_pixels(images: Tensor, pixels: Pixels) -> Tensor:
    """Return the numbers that a model reads of images: ``(x · scale − mean) / deviation``, by channel.

    Args:
        images: Pixels from 0 to 255, shape (N, C, …), uint8.
        pixels: The scale, and mean and deviation of each channel or of all.

    Returns:
        Numbers of the same shape, float32.

    Raises:
        WrongShape: If the images are not uint8, or have another number of channels.
    """
    if images.dtype != torch.uint8:
        raise WrongShape(f"`pixels` are of uint8 images (got {images.dtype}); leave it out", pointer="/data/pixels")
    channels = images.shape[1] if images.ndim > 2 else 1
    moments = []
    for name in ("mean", "deviation"):
        numbers = getattr(pixels, name)
        if len(numbers) not in (1, channels):
            raise WrongShape(
                f"`pixels.{name}` holds {len(numbers)} numbers, and images of shape {tuple(images.shape[1:])} have "
                f"{channels} channels; give one for each, or one for all",
                pointer=f"/data/pixels/{name}",
            )
        moments.append(
            torch.tensor(numbers, dtype=torch.float32, device=images.device).view(-1, *(1 for _ in images.shape[2:]))
        )
    return images.to(torch.float32).mul_(pixels.scale).sub_(moments[0]).div_(moments[1])


def _is_tensor(value: object) -> bool:
    """Whether a value is a tensor, or an array such as numpy's."""
    return isinstance(value, Tensor) or hasattr(value, "__array__")


def _is_mapping_of_tensors(value: object) -> bool:
    return isinstance(value, Mapping) and all(_is_tensor(each) for each in value.values())


def _as_tensors(chunk: Any) -> Any:  # noqa: ANN401
    """Return a chunk with tensors in the place of arrays, and of a list of numbers that is its targets."""
    if not isinstance(chunk, (tuple, list)) or len(chunk) not in (2, 3):
        return chunk
    targets = chunk[1]
    if isinstance(targets, (tuple, list)) and targets and all(isinstance(each, (int, float)) for each in targets):
        targets = torch.tensor(
            targets, dtype=torch.float64 if any(isinstance(each, float) for each in targets) else None
        )
    return tuple(
        _tree_of_tensors(part, name)
        for part, name in zip((chunk[0], targets, *chunk[2:]), ("inputs", "targets", "index"), strict=False)
    )


def _tree_of_tensors(tree: Any, name: str) -> Any:  # noqa: ANN401
    if isinstance(tree, Tensor):
        _require_dense(tree, name)
        return tree
    if isinstance(tree, Mapping):
        return {key: _tree_of_tensors(value, f"{name}.{key}") for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return tuple(_tree_of_tensors(value, f"{name}[{place}]") for place, value in enumerate(tree))
    if not hasattr(tree, "__array__"):
        return tree
    _require_unmasked(tree, name)
    array = tree.__array__()
    # files of other machines have their bytes in another order, which torch does not read
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    try:
        # torch shares an array's memory, which it cannot where that is read-only or runs backwards
        shared = array.flags.writeable and all(stride >= 0 for stride in array.strides)
        return torch.as_tensor(array if shared else array.copy())
    except (TypeError, ValueError) as error:
        raise WrongShape(
            f"{name} must hold numbers (got an array of {array.dtype}); give integers for classes, else floats",
            pointer="/data",
        ) from error


def _require_dense(tensor: Tensor, name: str) -> None:
    """Raise ``WrongShape`` for a tensor of which no examples can be cut."""
    if tensor.is_nested:
        kind, remedy = "nested", "pad its examples to one length"
    elif tensor.is_quantized:
        kind, remedy = "quantized", "give its numbers (`tensor.dequantize()`)"
    elif tensor.layout != torch.strided:
        kind, remedy = (
            f"{tensor.layout}",
            "give dense ones (`tensor.to_dense()`), a batch at a time where all are too large",
        )
    else:
        return
    raise WrongShape(f"{name} must be an ordinary tensor (got a {kind} one); {remedy}", pointer="/data")


def _require_unmasked(array: Any, name: str) -> None:  # noqa: ANN401 - numpy's, which is not imported here
    """Raise ``WrongShape`` for an array of ``numpy.ma`` of which some numbers are masked: a tensor has no mask."""
    if hasattr(array, "filled") and array.mask.any():
        masked = f"{int(array.mask.sum())} of its {array.size} numbers"
        raise WrongShape(
            f"{name} must hold numbers everywhere (got a masked array without {masked}); leave those examples "
            "out, or fill in numbers (`array.filled(…)`, targets that do not count with `task.ignore_index`)",
            pointer="/data",
        )


def _is_map_style(data: object) -> bool:
    """Return whether data are indexed by 0 … n − 1, as PyTorch's map-style datasets are; lists hold chunks."""
    indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return indexed and not isinstance(data, (list, tuple, Mapping, Tensor, str, bytes))


def _items(data: Any) -> Iterable[Any]:  # noqa: ANN401
    if hasattr(data, "__iter__"):
        return data  # type: ignore[no-any-return]
    return (data[place] for place in range(len(data)))


def _chunk_of_one(item: Any, place: int) -> tuple[Any, ...]:  # noqa: ANN401
    parts = _pair(item) if isinstance(item, Mapping) else item
    if not isinstance(parts, (tuple, list)) or len(parts) not in (2, 3):
        shown = type(parts).__name__ + (f" of {len(parts)}" if isinstance(parts, (tuple, list)) else "")
        raise WrongShape(
            f"item {place} of the dataset is {shown}; it must be (input, target), (input, target, index), or a mapping "
            f"with one of {', '.join(TARGET_NAMES)}",
            pointer="/data",
        )
    parts = [
        _tree_of_tensors(part, f"the {name} of item {place}") if _is_tensor(part) or isinstance(part, Mapping) else part
        for part, name in zip(parts, ("input", "target", "index"), strict=False)
    ]
    try:
        return tuple(default_collate([part]) for part in parts)
    except TypeError as error:
        raise WrongShape(
            f"item {place} of the dataset cannot be made a tensor ({str(error)[:200]}); "
            "give tensors, arrays or numbers",
            pointer="/data",
        ) from error


def _pair(item: Mapping[str, Any]) -> tuple[Any, Any]:
    target = next((name for name in TARGET_NAMES if name in item), None)
    if target is None:
        there = ", ".join(map(str, item)) or "nothing"
        raise WrongShape(
            f"the data yield a mapping with {there}; one entry must be called {' or '.join(TARGET_NAMES)}",
            pointer="/data",
        )
    inputs = {name: value for name, value in item.items() if name != target}
    if len(inputs) == 1 and next(iter(inputs)) in _INPUT_NAMES:
        return next(iter(inputs.values())), item[target]
    return inputs, item[target]
