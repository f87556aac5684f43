"""The NaN check: it finds the first batch with a number that is not finite, and the module that it comes from.

The sums are tested once per batch, by the traces of all of them together: a NaN or an infinity
anywhere in the rows of a batch reaches the diagonal of ``Σ row rowᵀ``, and no sum ever recovers.
Only then is the batch run again, in slices and without a graph, to find the module.

Labels are held against the classes of the model before a pass is made: a label that no class has would end the pass.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from catalog.requests.inputs import Task
from catalog.responses.layer_record import WHOLE_MODEL
from engine.accumulation.layer_statistics import LayerStatistics
from engine.errors import NonFiniteFactor, NonFiniteLoss, NonFiniteModel, WrongShape
from engine.factors.dense import diagonals
from engine.model.batches import Batch, tensors
from engine.model.outputs import predict
from engine.model.sharding.gathered_parameters import present


def require_known_labels(
    labels: Callable[[], Iterator[tuple[Tensor, Tensor]]] | None, classes: int, task: Task
) -> None:
    """Require that every label that can be read without its inputs is a class of the model.

    ``labels`` reads targets (n, …) with the indices (n,) of their examples; None where only a pass shows them. Only
    labels of a cross-entropy are looked at, and no tokens, of which padding may be any. ``WrongShape`` if a label is
    below 0 or above the last class, and is not the one to be ignored.
    """
    if labels is None or task.likelihood != "cross_entropy" or task.type == "causal_lm":
        return
    for targets, index in labels():
        if targets.is_floating_point() or targets.is_complex() or not targets.numel():
            continue
        whole = targets.to(torch.int64).reshape(len(index), -1)
        unknown = torch.nonzero(((whole < 0) | (whole >= classes)) & (whole != task.ignore_index))
        if len(unknown):
            example, term = (int(place) for place in unknown[0])
            raise WrongShape(
                f"the label of example {int(index[example])} is {int(whole[example, term])}, but the model has "
                f"{classes} classes (0 to {classes - 1}); correct the labels, mark them {task.ignore_index} to be "
                "ignored, or take a model with a class for each",
                pointer="/data",
            )


_SLICES = 8
"""The batch is run again in so many parts: less memory than the batch itself took, and a narrower answer."""


def require_finite_model(model: nn.Module) -> None:
    """Require finite parameters and buffers without NaN; ``NonFiniteModel`` names the tensor.

    A buffer may hold infinities: a causal mask does, and what keeps account of a best loss. Outputs tell of the others.
    """
    # torch cannot ask a sparse tensor; what it brings into the outputs is seen there
    asked = {
        name: tensor
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.layout == torch.strided and tensor.is_floating_point()
    }
    finite = [_is_usable(tensor).all() for tensor in asked.values()]
    if all(bool(torch.stack(group).all()) for group in _by_device(finite)):
        return
    for (name, tensor), whole in zip(asked.items(), finite, strict=True):
        if not bool(whole):
            bad = int((~_is_usable(tensor)).sum())
            numbers = f"{bad} {'NaN or infinite number' if isinstance(tensor, nn.Parameter) else 'NaN'}"
            raise NonFiniteModel(
                f"the model's tensor `{name}` holds {numbers}{'s' if bad > 1 else ''} of "
                f"{tensor.numel()}; mend the checkpoint",
                layer=name.rpartition(".")[0] or WHOLE_MODEL,
                pointer="/model",
            )


def _is_usable(tensor: Tensor) -> Tensor:
    """Whether each number of a parameter is finite, or none of a buffer's is NaN."""
    numbers = _comparable(present(tensor))
    return torch.isfinite(numbers) if isinstance(tensor, nn.Parameter) else ~torch.isnan(numbers)


def _comparable(tensor: Tensor) -> Tensor:
    """The tensor in a type that torch compares numbers in; it does not those of one byte."""
    return tensor.float() if tensor.element_size() == 1 else tensor


@dataclass
class CurrentBatch:
    """The batch that is passing through."""

    batch: Batch | None = None
    number: int = 0
    """Batches before it."""
    read: int = 0
    """Examples before it."""

    def begin(self, batch: Batch, number: int) -> None:
        """Take note of the next batch."""
        if self.batch is not None:
            self.read += self.batch.size
        self.batch, self.number = batch, number

    def require_finite(self, statistics: tuple[LayerStatistics, ...]) -> None:
        """Test the sums after a batch."""
        sums = [diagonal.sum() for found in statistics for _, diagonal in _diagonals(found)]
        if not sums or all(bool(torch.stack(group).sum().isfinite()) for group in _by_device(sums)):
            return
        bad = [(found, side, diagonal) for found in statistics for side, diagonal in _diagonals(found)]
        bad = [(found, side, diagonal) for found, side, diagonal in bad if not bool(diagonal.isfinite().all())]
        if bad:
            # gradients come from the end: the last layer is the first of them, and a bad input is before any
            found, side, diagonal = next((entry for entry in bad if entry[1] == "A"), bad[-1])
            count = int((~diagonal.isfinite()).sum())
            what = "input" if side == "A" else "output gradient"
            raise NonFiniteFactor(
                f"layer `{found.layer.name}`: {count} of the {diagonal.numel()} moments on the diagonal of {side} are "
                f"NaN or infinite after {self.place()}: its {what} holds such a number, or one whose square "
                f"overflows at {str(diagonal.dtype).removeprefix('torch.')}; mend the data or the model, "
                "or take `collection.dtype: float64`",
                layer=found.layer.name,
                pointer="/data",
            )

    def place(self, start: int = 0, stop: int | None = None) -> str:
        """Describe the batch and its examples; both are counted from 0."""
        size = 0 if self.batch is None else self.batch.size
        last = self.read + (size if stop is None else stop) - 1
        return f"batch {self.number} (examples {self.read + start} to {last})"


@contextlib.contextmanager
def locate_nan(model: nn.Module, task: Task) -> Iterator[CurrentBatch]:
    """Complete the error of outputs that are not finite, by the module that first put out such numbers.

    The context is shown each batch before it goes through the model; ``NonFiniteLoss``, where the block raises it,
    names batch and module.
    """
    current = CurrentBatch()
    try:
        yield current
    except NonFiniteLoss as error:
        found = None if current.batch is None else _first_sign(model, task, current)
        raise (found or error) from error


def _diagonals(found: LayerStatistics) -> Iterator[tuple[str, Tensor]]:
    """The diagonals of a layer's own sums; a sum that is a diagonal is its own."""
    for side, total in (("A", found.A), ("G", found.G)):
        if total is not None:
            yield side, diagonals(total)
    if found.gradient_rows is not None:
        yield "G", found.gradient_rows.largest


def _by_device(sums: list[Tensor]) -> Iterable[list[Tensor]]:
    groups: dict[torch.device, list[Tensor]] = {}
    for total in sums:
        groups.setdefault(total.device, []).append(total)
    return groups.values()


@dataclass(frozen=True, kw_only=True)
class _Sign:
    """A module whose output is not finite."""

    name: str
    module: str
    bad: int
    numbers: int
    entered: int
    """NaN or infinite numbers in what it was given."""


def _first_sign(model: nn.Module, task: Task, current: CurrentBatch) -> NonFiniteLoss | None:
    """The error that says where the outputs of the current batch go wrong; None where it is not known."""
    batch = current.batch
    if batch is None:
        return None
    stop = 0
    for part in batch.slices(max(2, -(-batch.size // _SLICES))):
        start, stop = stop, stop + part.size
        place = current.place(start, stop)
        given = _bad(part.inputs)
        # a mask of nothing but minus infinities is not a fault
        if given > sum(int((tensor == -torch.inf).sum()) for tensor in tensors(part.inputs)):
            return NonFiniteLoss(
                f"the data's inputs hold {given} NaN or infinite number{'s' * (given > 1)} in {place}; mend the data",
                pointer="/data",
            )
        with _signs(model) as signs:
            try:
                with torch.no_grad():
                    predict(model, part, task)
            except NonFiniteLoss:
                return _said(signs, place)
            except Exception:  # noqa: BLE001 - a slice may be refused where the batch was not: then the first error stands
                return None
    return None


def _said(signs: list[_Sign], place: str) -> NonFiniteLoss:
    if not signs:
        return NonFiniteLoss(
            f"the model's outputs hold NaN or Inf in {place}, and every module's output is finite: look at "
            "what the model computes between and after its modules"
        )
    first = signs[0]
    name = f"`{first.name}` ({first.module})" if first.name else f"the model itself ({first.module})"
    origin = (
        "what entered it is finite"
        if first.entered == 0
        else f"{first.entered} such number{'s' * (first.entered > 1)} entered it, made between modules"
    )
    return NonFiniteLoss(
        f"the model's outputs hold NaN or Inf in {place}; the first module to put out such numbers is "
        f"{name}, {first.bad} of {first.numbers}, and {origin}: look at its weights and "
        "inputs, or take `collection.dtype: float64`",
        layer=first.name or None,
    )


@contextlib.contextmanager
def _signs(model: nn.Module) -> Iterator[list[_Sign]]:
    """List the modules whose output is not finite, in the order they come to an end: inner ones first."""
    signs: list[_Sign] = []

    def watch(name: str) -> Any:  # noqa: ANN401 - torch's hook signature
        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:  # noqa: ANN401
            bad = _bad(output)
            if bad:
                numbers = sum(tensor.numel() for tensor in tensors(output))
                entered = _bad((args, kwargs))
                signs.append(_Sign(name=name, module=type(module).__name__, bad=bad, numbers=numbers, entered=entered))

        return after

    handles = [
        module.register_forward_hook(watch(name), with_kwargs=True, prepend=True)
        for name, module in model.named_modules()
    ]
    try:
        yield signs
    finally:
        for handle in handles:
            handle.remove()


def _bad(tree: Any) -> int:  # noqa: ANN401 - a model gives and takes anything
    """NaN or infinite numbers in the tensors of ``tree``."""
    found = [tensor for tensor in tensors(tree) if tensor.is_floating_point()]
    return sum(int((~torch.isfinite(tensor)).sum()) for tensor in found)
