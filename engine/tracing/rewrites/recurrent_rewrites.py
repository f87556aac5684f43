"""Recurrent rewrites: LSTM, GRU and RNN kernels as the linear products of their time steps.

With ``x_t`` entering and ``h_{t−1}`` the state before it, every kernel is pointwise in two products,

    u_t = W_ih x_t + b_ih        v_t = W_hh h_{t−1} + b_hh        (and h_t = W_hr h'_t where the state is projected)

so each weight, with the bias beside it, is a linear layer whose positions are the time steps. The two
biases are added and still differ: a GRU multiplies ``v_t`` alone by its reset gate.

``u`` is one product over all time steps. ``v`` cannot be: ``h_{t−1}`` comes out of the step before. A tensor of
zeros is added to it, whose gradient is that of ``v`` at every step, and it is shown as the result of one
product over all steps afterwards: sums and traces are then those of one call, also under `reduce`.

Padded and packed sequences go one way: rows (P, d) in order of time, so many at each step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.tracing.batch_provenance import Rows
from engine.tracing.matrix_products import Multiplying

State = tuple[Tensor, ...]
"""(h,), or (h, c) of an LSTM; each (B, width)."""
Step = Callable[[Tensor, Tensor, State], State]
"""The state after one step, from ``u_t``, ``v_t`` and the state before it."""


def _lstm_step(entering: Tensor, returning: Tensor, before: State) -> State:
    into, forget, cell, out = (entering + returning).chunk(4, -1)
    kept = forget.sigmoid() * before[1] + into.sigmoid() * cell.tanh()
    return out.sigmoid() * kept.tanh(), kept


def _gru_step(entering: Tensor, returning: Tensor, before: State) -> State:
    reset, update, new = entering.chunk(3, -1)
    reset_again, update_again, new_again = returning.chunk(3, -1)
    fresh = (new + (reset + reset_again).sigmoid() * new_again).tanh()
    return (fresh + (update + update_again).sigmoid() * (before[0] - fresh),)


def _tanh_step(entering: Tensor, returning: Tensor, before: State) -> State:
    del before
    return ((entering + returning).tanh(),)


def _relu_step(entering: Tensor, returning: Tensor, before: State) -> State:
    del before
    return ((entering + returning).relu(),)


@dataclass(frozen=True)
class _Weights:
    """The parameters of one layer in one direction."""

    entering: Tensor
    """W_ih."""
    returning: Tensor
    """W_hh."""
    entering_bias: Tensor | None = None
    returning_bias: Tensor | None = None
    projecting: Tensor | None = None
    """W_hr, of an LSTM whose state is projected."""
    reverse: bool = False
    """Whether they go from the last step to the first."""

    def __iter__(self) -> Iterator[Tensor]:
        everything = (self.entering, self.returning, self.entering_bias, self.returning_bias, self.projecting)
        return (tensor for tensor in everything if tensor is not None)


class _NotLinear(Exception):
    """A weight enters no product that can be shown."""


@dataclass(frozen=True)
class _Sequences:
    """Rows (P, ·) in order of time, and whose they are."""

    sizes: tuple[int, ...]
    """Sequences that are still running at each step, descending."""
    rows: Rows
    """The place of the examples among the P rows."""

    @property
    def batch(self) -> int:
        """Sequences B."""
        return self.sizes[0]


def _unrolled(mode: Multiplying, *args: Any, step: Step) -> Any:  # noqa: ANN401 - as torch returns
    """Run a kernel over whole sequences: (output, h_n) or, of an LSTM, (output, h_n, c_n)."""
    packed = not isinstance(args[3], bool)
    data, *sizes = args[:2] if packed else args[:1]
    states, flat, biased, layers, dropout, training, both, *batch_first = args[len(sizes) + 1 :]
    initial = (states,) if isinstance(states, Tensor) else tuple(states)
    if any(mode.is_data(tensor) for tensor in flat) or mode.is_derived(data):
        return NotImplemented
    leading = bool(batch_first) and bool(batch_first[0])
    rows = mode.rows_of(data)
    if packed:
        sequences = None if rows is None else _Sequences(tuple(sizes[0].tolist()), rows)
    else:
        data = data.transpose(0, 1) if leading else data
        sequences = _stepwise(data, rows, 0 if leading else 1)
        steps, data = data.shape[0], data.flatten(0, 1)
    if sequences is None:
        return NotImplemented
    ends: list[State] = []
    try:
        initial = _spread(mode, initial, sequences, data)
        directions = 2 if both else 1
        weights = _weights(flat, layers, directions, biased=biased)
        for layer in range(layers):
            if layer and dropout:
                data = functional.dropout(data, dropout, training)
            mode.with_rows(data, sequences.rows)
            outputs = [
                _directed(mode, step, data, sequences, weights[place], tuple(each[place] for each in initial))
                for place in range(layer * directions, (layer + 1) * directions)
            ]
            data = torch.cat([output for output, _ in outputs], -1)
            ends += [end for _, end in outputs]
    except _NotLinear:
        return NotImplemented
    if packed:
        mode.with_rows(data, sequences.rows)
    else:
        data = data.unflatten(0, (steps, sequences.batch))
        data = data.transpose(0, 1) if leading else data
        mode.with_rows(data, _of_sequences(sequences, 0 if leading else 1))
    last = [mode.with_rows(torch.stack(side), _of_sequences(sequences, 1)) for side in zip(*ends, strict=True)]
    return data, *last


def _cell(mode: Multiplying, *args: Any, step: Step) -> Any:  # noqa: ANN401 - as torch returns
    """Run one step by itself: h or, of an LSTM, (h, c)."""
    data, states, *parameters = args
    initial = (states,) if isinstance(states, Tensor) else tuple(states)
    weights = _Weights(*parameters)
    rows = mode.rows_of(data)
    if any(mode.is_data(tensor) for tensor in weights) or mode.is_derived(data) or rows is None:
        return NotImplemented
    if rows.dim != 0:
        return NotImplemented
    sequences = _Sequences((data.shape[0],), rows)
    try:
        initial = _spread(mode, initial, sequences, data)
        _, after = _directed(mode, step, data, sequences, weights, initial)
    except _NotLinear:
        return NotImplemented
    results = tuple(mode.with_rows(side, rows) for side in after)
    return results if len(results) > 1 else results[0]


def _stepwise(data: Tensor, rows: Rows | None, dim: int) -> _Sequences | None:
    """Return padded sequences (T, B, d) flattened, where ``rows`` say that their examples are along ``dim``."""
    steps, batch = data.shape[:2]
    if rows is not None and rows.minor == rows.size:
        # one example alone
        return _Sequences((batch,) * steps, Rows(dim=0, minor=steps * batch, size=steps * batch))
    if rows is None or rows.dim != dim:
        # along time, say: one example's state then goes into the next one's
        return None
    if rows.labels is not None:
        flat = Rows(dim=0, minor=rows.minor, size=rows.size, labels=rows.labels.repeat(steps))
    else:
        flat = Rows(dim=0, minor=rows.minor, size=rows.size * steps)
    return _Sequences((batch,) * steps, flat)


def _of_sequences(sequences: _Sequences, dim: int) -> Rows:
    """Return the place of the examples in a tensor with one index along ``dim`` for each sequence."""
    rows = sequences.rows
    if rows.labels is not None:
        return Rows(dim=dim, minor=rows.minor, size=rows.size, labels=rows.labels[: sequences.batch])
    if rows.minor == rows.size:
        return Rows(dim=dim, minor=sequences.batch, size=sequences.batch)
    return Rows(dim=dim, minor=rows.minor, size=sequences.batch)


def _spread(mode: Multiplying, initial: State, sequences: _Sequences, data: Tensor) -> State:
    """Return the first states; a learned one is added to zeros of the data's, so that each example has its own copy."""
    if not any(mode.is_derived(state) for state in initial):
        return initial
    zeros = mode.with_rows(data.detach().new_zeros(sequences.batch, 1), _of_sequences(sequences, 0))
    with mode:
        return tuple(state + zeros if mode.is_derived(state) else state for state in initial)


def _weights(flat: Sequence[Tensor], layers: int, directions: int, *, biased: bool) -> list[_Weights]:
    """Return the parameters of each layer and direction, from torch's flat list of them."""
    each = len(flat) // (layers * directions)
    weights = []
    for place in range(layers * directions):
        entering, returning, *others = flat[place * each : (place + 1) * each]
        biases = others[:2] if biased else (None, None)
        projecting = others[-1] if each % 2 else None
        reverse = place % directions == 1
        weights.append(_Weights(entering, returning, biases[0], biases[1], projecting, reverse=reverse))
    return weights


def _directed(
    mode: Multiplying, step: Step, data: Tensor, sequences: _Sequences, weights: _Weights, initial: State
) -> tuple[Tensor, State]:
    """The outputs (P, width) of one layer in one direction, and its last states (B, ·).

    Memory:
        What autograd saves of each step, as of any loop; what enters each product once more.
    """
    sizes = list(sequences.sizes)
    entering = torch.split(_product(mode, data, weights.entering, weights.entering_bias), sizes)
    matrix = weights.returning.detach()
    bias = None if weights.returning_bias is None else weights.returning_bias.detach()
    returning = _zeros(data, entering[0].dtype, weights.returning.shape[0])
    projected = None if weights.projecting is None else _zeros(data, entering[0].dtype, weights.projecting.shape[0])
    order = range(len(sizes))[:: -1 if weights.reverse else 1]
    state: State = tuple(side[: sizes[order[0]]] for side in initial)
    ended: list[State] = []
    before, raw, outputs = ([data] * len(sizes) for _ in range(3))
    shift = torch.split(returning, sizes)
    projected_shift = () if projected is None else torch.split(projected, sizes)
    for at in order:
        running, held = sizes[at], state[0].shape[0]
        if running < held:
            ended.append(tuple(side[running:] for side in state))
            state = tuple(side[:running] for side in state)
        elif running > held:
            state = tuple(torch.cat([side, first[held:running]]) for side, first in zip(state, initial, strict=True))
        before[at] = state[0]
        state = step(entering[at], functional.linear(state[0], matrix, bias) + shift[at], state)
        raw[at] = state[0]
        if weights.projecting is not None:
            state = (functional.linear(state[0], weights.projecting.detach()) + projected_shift[at], *state[1:])
        outputs[at] = state[0]
    rows = sequences.rows
    _product(mode, mode.with_rows(torch.cat(before), rows), weights.returning, weights.returning_bias, returning)
    if weights.projecting is not None:
        _product(mode, mode.with_rows(torch.cat(raw), rows), weights.projecting, None, projected)
    last = tuple(torch.cat(sides) for sides in zip(state, *reversed(ended), strict=True))
    return torch.cat(outputs), last


def _product(
    mode: Multiplying, entered: Tensor, weight: Tensor, bias: Tensor | None, left: Tensor | None = None
) -> Tensor:
    """Compute ``entered Wᵀ + b``, shown if either can be trained; ``left`` stands for one that is computed already."""

    def run() -> Tensor:
        plain = None if bias is None else bias.detach()
        return functional.linear(entered, weight.detach(), plain) if left is None else left

    if not mode.is_derived(weight) and not mode.is_derived(bias):
        return run()
    shown = mode.product(entered, weight, bias, run)
    if shown is NotImplemented:
        raise _NotLinear
    stands: Tensor = shown
    return stands


def _zeros(data: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    """Return zeros (P, width), one number of memory, of which a gradient can be asked."""
    seed = torch.zeros((), dtype=dtype, device=data.device, requires_grad=torch.is_grad_enabled())
    return seed.expand(data.shape[0], width)


RECURRENT: Mapping[str, Callable[..., Any]] = {
    "lstm": partial(_unrolled, step=_lstm_step),
    "gru": partial(_unrolled, step=_gru_step),
    "rnn_tanh": partial(_unrolled, step=_tanh_step),
    "rnn_relu": partial(_unrolled, step=_relu_step),
    "lstm_cell": partial(_cell, step=_lstm_step),
    "gru_cell": partial(_cell, step=_gru_step),
    "rnn_tanh_cell": partial(_cell, step=_tanh_step),
    "rnn_relu_cell": partial(_cell, step=_relu_step),
}
"""By the name of torch's function."""
