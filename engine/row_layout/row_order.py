"""Row order: a test whether flat rows, several for each example, stand example by example.

Of ``entered`` (N·l, d) the shape does not say whether row i is example ``i // l``'s or ``i % N``'s (time before batch,
two images of a pair one behind the other), or whose it is at all. Different examples show it: their rows in a batch
are held against those of each example alone. Rows position by position are put in order before they enter anything.
Where the rows of a batch are those of its examples in an order of their own (packed texts), sums over all of them are
right, and nothing that is said of single examples is: such a layer has A and G and no exact trace.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.layers.layer import TreatedLayer
from engine.layers.parameter_slice import Places
from engine.model.batches import Batch
from engine.row_layout.attention_masks import RECOMPUTED, Key, Masking, Run, number_calls
from engine.row_layout.layer_calls import Call
from engine.row_layout.unbatched_inputs import close

Order = Literal["examples", "positions", "unknown", "mixed", "unproven"]
_EXAMPLES = 4
"""Examples that are held against themselves alone."""


@dataclass(frozen=True, kw_only=True)
class RowOrders:
    """Calls whose rows do not stand example by example."""

    by_position: frozenset[Key] = frozenset()
    """Calls with the first row of each example, then the second of each, and so on."""
    unordered: frozenset[str] = frozenset()
    """Parts of layers of which some call has rows in an order of their own, by name."""

    def by_positions(self, key: Key) -> bool:
        """Tell whether the rows of a call stand position by position.

        Args:
            key: The call; one that activation checkpointing runs again stands as any other call of its layer does.

        Returns:
            True where they do, False where they stand example by example or are not known to.
        """
        if key[1] == RECOMPUTED:
            return any(key[0] == name for name, _ in self.by_position)
        return key in self.by_position

    def unordered_among(self, layers: Iterable[TreatedLayer]) -> frozenset[str]:
        """Select the layers whose rows stand in an order of their own.

        Returns:
            Names of those of which some part has such a call.
        """
        return frozenset(
            layer.name for layer in layers if not self.unordered.isdisjoint(role.name for role in layer.roles)
        )


@dataclass(frozen=True, kw_only=True)
class Operations:
    """The parameters that a pass follows through operations, whichever of their layers it collects.

    A product with one of them may have its rows from another: of queries that are expanded, say.
    """

    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    """Parameters of any shape, by name; those that no layer covers are among them."""
    places: Places = frozenset()
    """Places in them that are layers."""
    whole: Mapping[str, bool] = field(default_factory=dict)
    """Names of those that are layers by themselves: whether a dimension for the examples is in front of them."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The layers' rows in a pass, as a probe of the model shows them."""

    tables: frozenset[str] = frozenset()
    """Embeddings that are looked up once for a batch, to be spread over its examples."""
    operations: Operations = field(default_factory=Operations)
    """The parameters that are followed through operations."""
    masking: Masking = field(default_factory=Masking)
    """The calls that a batch's mask is laid on."""
    orders: RowOrders = field(default_factory=RowOrders)
    """The calls whose rows do not stand example by example."""
    overwritten: frozenset[str] = frozenset()
    """Layers whose input the model writes to afterwards: they keep a copy."""


def example_first(tensor: Tensor, examples: int) -> Tensor:
    """Put rows that stand position by position in the order of their examples.

    Args:
        tensor: Rows, shape (l·N, …): the first of each example, then the second of each, and so on.
        examples: N, which divides the number of rows.

    Returns:
        The same rows, shape (N·l, …), the l rows of one example behind each other.
    """
    return tensor.reshape(-1, examples, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)


def find_row_orders(batch: Batch, calls: Sequence[Call], examples: int, run: Run) -> RowOrders:
    """Find the order of the rows of each call, where its shape leaves it open.

    Args:
        batch: Different examples, of which a few are run together and alone.
        calls: Calls of a run of ``examples`` examples, in which no call is in doubt whose examples lead.
        examples: Examples of that run.
        run: Runs the model on a batch.

    Returns:
        The calls whose rows do not stand example by example; none where the batch has fewer than two examples.

    Memory:
        The inputs of all calls for four examples, and for one.
    """
    doubtful = {key: call for key, call in number_calls(calls) if _is_doubtful(call, examples)}
    count = min(_EXAMPLES, batch.size)
    if not doubtful or count < 2:
        return RowOrders()
    several = next(batch.slices(count))
    calls_together, outputs = run(several)
    together = dict(number_calls(calls_together))
    alone: dict[Key, list[Tensor]] = {key: [] for key in doubtful}
    outputs_alone: list[list[Tensor]] = []
    try:
        for single in several.slices(1):
            calls_alone, returned = run(single)
            outputs_alone.append(returned)
            numbered = dict(number_calls(calls_alone))
            for key in doubtful.keys() & numbered.keys():
                alone[key].append(numbered[key].entered)
    except EngineError:
        # examples that cannot be run alone
        return RowOrders(unordered=frozenset(name for name, _ in doubtful))
    orders = {key: _order(together[key].entered, alone[key], count) for key in doubtful if key in together}
    proven = {order for order in orders.values() if order != "unproven"}
    # rows that are alike in all examples, of segments say, stand as the others do
    usual = proven.pop() if len(proven) == 1 else "examples"
    orders = {key: usual if order == "unproven" else order for key, order in orders.items()}
    return RowOrders(
        by_position=frozenset(key for key, order in orders.items() if order == "positions"),
        # where examples mix, sums over all rows are not those of each example alone
        unordered=frozenset(
            key[0] for key, order in orders.items() if order == "unknown" and not _mixes(outputs, outputs_alone)
        ),
    )


def _is_doubtful(call: Call, examples: int) -> bool:
    entered = call.entered
    return entered.ndim > 0 and entered.shape[0] != examples and call.layer.batch_first(entered, examples)


def _order(together: Tensor, alone: Sequence[Tensor], count: int) -> Order:
    """Return the order of the rows ``together`` of ``count`` examples, of which ``alone`` are each one's."""
    if len(alone) != count or not _same_rows(together, torch.cat(list(alone))):
        return "mixed"
    each = together.shape[0] // count
    if any(one.shape[0] != each for one in alone):
        return "unknown"
    rows = torch.stack(list(alone))
    if close(rows[:1].expand_as(rows), rows):
        return "unproven"
    if close(together.reshape(rows.shape), rows):
        return "examples"
    return "positions" if close(together.reshape(each, count, *rows.shape[2:]).transpose(0, 1), rows) else "unknown"


def _same_rows(left: Tensor, right: Tensor) -> bool:
    """Tell whether two tensors hold the same rows, in whatever order."""
    if left.shape != right.shape:
        return False
    if not left.is_floating_point():
        return bool((left.flatten().sort().values == right.flatten().sort().values).all())
    rows, others = (side.reshape(-1, side.shape[-1]).to(torch.float64) for side in (left, right))
    return close(rows.T @ rows, others.T @ others) and close(rows.sum(0), others.sum(0))


def _mixes(together: Sequence[Tensor], alone: Sequence[Sequence[Tensor]]) -> bool:
    """Tell whether the model's outputs for one example depend on the others."""
    return any(
        output.shape[0] == len(alone) and not close(output, torch.cat(list(own)))
        for output, *own in zip(together, *alone, strict=False)
        if output.ndim and all(one.ndim == output.ndim and one.shape[0] == 1 for one in own)
    )
