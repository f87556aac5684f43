"""The oracle of the architecture table: each example alone, in plain autograd, float64, without our code.

With ``∇ℓ_n`` the gradient of example n's summed loss at the data's labels, of all parameters of a layer,

    exact trace = Σ_n ‖∇ℓ_n‖² / terms        block = Σ_n ∇ℓ_n ∇ℓ_nᵀ / terms

need nothing but parameters. A and G need the rows of a layer, which plain hooks on the modules of torch see (linear,
convolution, embedding): ``A = Σ a aᵀ / rows``, ``G = Σ g gᵀ / terms``. Rows that the attention mask leaves out leave
A, unless a gradient reaches one of that call in any example (docs/convention.md); they add nothing to G anyway.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.architecture_cases.case import Case, taken, trainable

IGNORED = -100
_PLAIN = {
    kind.forward
    for kind in (
        nn.Linear,
        nn.Conv1d,
        nn.Conv2d,
        nn.Conv3d,
        nn.Embedding,
        nn.modules.linear.NonDynamicallyQuantizableLinear,
    )
}


@dataclass
class Rows:
    """What entered and left the modules of one weight, position by position, of all examples."""

    a: list[Tensor] = field(default_factory=list)
    """(rows, groups, d_in) each; ids (rows,) of an embedding."""
    g: list[Tensor] = field(default_factory=list)
    """(rows, groups, d_out) each."""
    kept: list[Tensor | None] = field(default_factory=list)
    """(rows,) booleans each: what the attention mask leaves; None where the rows are not its positions."""
    call: list[int] = field(default_factory=list)
    """Which of its module's calls in one pass each comes of."""
    with_others: bool = False
    """The module was called with other weights in the place of its own, whose gradients these rows do not give."""

    def counted(self) -> Iterator[tuple[Tensor, Tensor]]:
        """``a`` and ``g`` of the rows that count."""
        reached = {
            call
            for call, g, kept in zip(self.call, self.g, self.kept, strict=True)
            if kept is not None and bool(g[~kept].any())
        }
        for call, a, g, kept in zip(self.call, self.a, self.g, self.kept, strict=True):
            yield (a, g) if kept is None or call in reached else (a[kept], g[kept])


@dataclass
class Truth:
    """What the layers of one model must be."""

    gradients: dict[str, Tensor]
    """(N, *shape) of every trainable parameter, under all its names; (N·C, *shape) for embeddings of C numbers."""
    terms: int
    rows: dict[str, Rows]
    """By module."""

    def zero(self, name: str) -> bool:
        """Whether no example's gradient reaches this parameter."""
        return not bool(self.gradients[name].any())


def truth(case: Case) -> Truth:
    """Gradients and rows of every example of ``case``."""
    parameters = trainable(case.model)
    unique = {id(each): each for each in parameters.values()}
    each_gradient: dict[int, list[Tensor]] = {key: [] for key in unique}
    rows: dict[str, Rows] = defaultdict(Rows)
    terms = 0
    for place in range(len(case.targets)):
        with _watched(case, place, rows), _plain_batch_norm():
            losses, count = _losses(case, place)
            for loss in losses:
                if loss.requires_grad:
                    found = torch.autograd.grad(loss, list(unique.values()), allow_unused=True, retain_graph=True)
                else:
                    found = (None,) * len(unique)
                for (key, parameter), gradient in zip(unique.items(), found, strict=True):
                    each_gradient[key].append(torch.zeros_like(parameter) if gradient is None else gradient)
        terms += count
    gradients = {name: torch.stack(each_gradient[id(each)]) for name, each in parameters.items()}
    own_rows = {name: each for name, each in rows.items() if not each.with_others}
    return Truth(gradients=gradients, terms=terms, rows=own_rows)


def _losses(case: Case, place: int) -> tuple[list[Tensor], int]:
    """Return what one example contributes, with its terms: the summed loss, or √(2/C) times each of C embedded numbers.

    The mean of C squared errors has the Hessian 2/C, which has no targets in it (`fisher: type2`).
    """
    if case.task not in ("embedding", "sentence_embedding"):
        loss, count = _summed(case, place)
        return [loss], count
    hidden = case.model(**taken(case.inputs, place)).last_hidden_state
    hidden = hidden.flatten(2).mean(2) if hidden.ndim > 3 else hidden.mean(1) if hidden.ndim == 3 else hidden
    return list(hidden[0] * (2 / hidden.shape[-1]) ** 0.5), 1


def _summed(case: Case, place: int) -> tuple[Tensor, int]:
    """Summed loss of one example, and its terms."""
    target = case.targets[place : place + 1]
    labelled = case.loss == "model"
    inputs = taken(case.inputs, place) if case.alone else case.inputs
    if isinstance(inputs, dict):
        returned = case.model(**inputs, labels=target) if labelled else case.model(**inputs)
    else:
        parts = inputs if isinstance(inputs, tuple) else (inputs,)
        returned = case.model(*parts, target) if labelled else case.model(*parts)
    if labelled:
        shifted = target[:, 1:] if case.task == "causal_lm" and not case.prompted else target
        count = int((shifted != IGNORED).sum()) if not target.is_floating_point() else 1
        loss = _field(returned, "loss")
        return (loss * count if count else loss.new_zeros(())), count
    outputs = _field(returned, "logits")
    if not case.alone:
        outputs = outputs[place : place + 1]
    if case.task == "causal_lm":
        outputs, target = outputs[:, :-1], target[:, 1:]
        kept = inputs.get("attention_mask") if isinstance(inputs, dict) else None
        if kept is not None:
            target = torch.where((kept[:, 1:] & kept[:, :-1]).bool(), target, IGNORED)
    if case.task == "regression":
        outputs = outputs.reshape(-1, outputs.shape[-1])
        # the loss of a term is the mean over its C outputs
        rows, wide = outputs.shape
        return functional.mse_loss(outputs, target.reshape(outputs.shape), reduction="sum") / wide, rows
    if outputs.ndim > 2 and target.shape == outputs.shape[:1] + outputs.shape[2:]:
        outputs = outputs.movedim(1, -1)
    flat, classes = outputs.reshape(-1, outputs.shape[-1]), target.reshape(-1)
    return functional.cross_entropy(flat, classes, reduction="sum", ignore_index=IGNORED), int(
        (classes != IGNORED).sum()
    )


def _field(returned: Any, name: str) -> Tensor:  # noqa: ANN401 - models return anything
    if isinstance(returned, Tensor):
        return returned
    found = returned.get(name) if isinstance(returned, dict) else getattr(returned, name, None)
    if isinstance(found, Tensor):
        return found
    parts = list(returned.values()) if isinstance(returned, dict) else list(returned)
    return next(part for part in parts if isinstance(part, Tensor))


@contextmanager
def _watched(case: Case, place: int, rows: dict[str, Rows]) -> Iterator[None]:
    """Hooks on the modules whose rows are plain, for the pass of one example."""

    def see(name: str, module: nn.Module, call: int, entered: Tensor, output: Tensor) -> None:
        kept = _kept(case, place, name, module)
        weights = module._parameters.values()  # noqa: SLF001 - as they are in this call
        rows[name].with_others |= any(each is not None and not isinstance(each, nn.Parameter) for each in weights)
        output.register_hook(lambda gradient: _add(rows[name], call, module, entered.clone(), gradient, kept))

    with _hooked(case, see):
        yield


@contextmanager
def _hooked(case: Case, see: Callable[[str, nn.Module, int, Tensor, Tensor], None]) -> Iterator[None]:
    """Show ``see`` every call of a plain module that depends on what is trainable."""

    def watch(name: str, module: nn.Module) -> Any:  # noqa: ANN401 - torch's handle
        calls = itertools.count()

        def after(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            if output.requires_grad:
                see(name, module, next(calls), args[0].detach(), output)

        return module.register_forward_hook(after)

    every = case.model.named_modules(remove_duplicate=False)
    handles = [watch(name, module) for name, module in every if _is_plain(module)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _mask(case: Case, place: int) -> Tensor | None:
    found = case.inputs.get("attention_mask") if isinstance(case.inputs, dict) else None
    return None if found is None or found.ndim != 2 else found[place].bool()


def _kept(case: Case, place: int, name: str, module: nn.Module) -> Tensor | None:
    """The mask of one example, where the module's positions may be its own."""
    own = case.padded(name) and not isinstance(module, nn.modules.conv._ConvNd)  # noqa: SLF001 - the common ancestor
    return _mask(case, place) if own else None


@contextmanager
def _plain_batch_norm() -> Iterator[None]:
    """Let batch norms with statistics of their own compute by arithmetic.

    torch 2.13 misreads their gradient on a CPU where a batch of one leaves the memory order open; differences of the
    loss agree with this one.
    """
    own = functional.batch_norm

    def plain(
        x: Tensor,
        mean: Tensor | None,
        variance: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if training or mean is None or variance is None:
            return own(x, mean, variance, weight, bias, training, momentum, eps)
        shape = (1, -1, *[1] * (x.ndim - 2))
        found = (x - mean.view(shape)) / (variance.view(shape) + eps).sqrt()
        found = found if weight is None else found * weight.view(shape)
        return found if bias is None else found + bias.view(shape)

    functional.batch_norm = plain
    try:
        yield
    finally:
        functional.batch_norm = own


def _is_plain(module: nn.Module) -> bool:
    own = type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
    if not own and type(module).forward not in _PLAIN:
        return False
    if "forward" in vars(module) or hasattr(module, "parametrizations") or module._forward_pre_hooks:  # noqa: SLF001 - old weight norms
        return False
    return any(parameter.requires_grad for parameter in module.parameters(recurse=False))


def _add(rows: Rows, call: int, module: nn.Module, entered: Tensor, gradient: Tensor, kept: Tensor | None) -> None:
    a, g = _rows(module, entered, gradient.detach())
    rows.a.append(a)
    rows.g.append(g)
    rows.kept.append(kept if kept is not None and len(g) == len(kept) else None)
    rows.call.append(call)


def _rows(module: nn.Module, entered: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(module, nn.Embedding):
        return entered.reshape(-1), gradient.reshape(-1, 1, gradient.shape[-1])
    if not isinstance(module, nn.modules.conv._ConvNd):  # noqa: SLF001 - the common ancestor has no other name
        return entered.reshape(-1, 1, entered.shape[-1]), gradient.reshape(-1, 1, gradient.shape[-1])
    axes, groups = len(module.kernel_size), module.groups
    if entered.ndim == axes + 1:
        entered, gradient = entered[None], gradient[None]
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padded = functional.pad(entered, module._reversed_padding_repeated_twice, mode=mode)  # noqa: SLF001 - as its forward pads
    channels = module.in_channels // groups
    width = channels * module.weight[0, 0].numel()
    # a patch is what a kernel with a single one in it picks
    picking = torch.eye(width, dtype=entered.dtype).reshape(width, channels, *module.kernel_size)
    convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[axes - 1]
    patches = convolve(
        padded, picking.repeat(groups, *[1] * (axes + 1)), None, module.stride, 0, module.dilation, groups
    )
    return (
        patches.movedim(1, -1).reshape(-1, groups, width),
        gradient.movedim(1, -1).reshape(-1, groups, module.out_channels // groups),
    )


def activation_factor(rows: list[Rows], modules: list[nn.Module], group: int, *, weight: bool, bias: bool) -> Tensor:
    """``Σ a aᵀ / rows`` of modules of one weight; its diagonal for an embedding."""
    if isinstance(modules[0], nn.Embedding):
        ids = torch.cat([each for own in rows for each, _ in own.counted()])
        return torch.bincount(ids, minlength=modules[0].num_embeddings).double() / len(ids)
    a = torch.cat([each[:, group] for own in rows for each, _ in own.counted()])
    if not weight:
        a = a[:, :0]
    if bias:
        a = torch.cat([a, a.new_ones(len(a), 1)], 1)
    return a.T @ a / len(a)


def gradient_factor(rows: list[Rows], group: int, terms: int) -> Tensor:
    """``Σ g gᵀ / terms`` of modules of one weight."""
    g = torch.cat([each[:, group] for own in rows for _, each in own.counted()])
    return g.T @ g / terms
