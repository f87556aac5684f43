"""Token importance: the exact diagonal of a head's G, kept as an artifact, with how few tokens carry most of it.

``G_vv = E[g_v²]`` over loss terms: of a softmax under `mc` and `type2`, where its probabilities are kept, the mean of
``p_v (1 − p_v)``, which no sampling enters; elsewhere the sum of the collected gradients' squares. Where a table holds
the head's weight, G is that of the nearest product of both uses; the diagonal of the head's own is kept beside it.
"""

import torch
from torch import Tensor

from catalog.analyses.capacity_metrics import TokenImportance
from engine.errors import NoSuchLayer
from engine.factors.factor_set import FactorSet, LayerFacts
from engine.factors.kronecker_factors import Factors
from engine.layers.tied import NEAREST
from engine.workspace import Workspace

POINTER = "/capacity/token_importance"
_SHARE = 0.99
_MOST = 10


def require_head(name: str | None, workspace: Workspace) -> None:
    """Refuse a head that the model does not have, or a Fisher without gradients, before anything is collected."""
    if name is None or workspace.inputs.model is None:
        return
    if workspace.options.collection.fisher == "forward_only":
        raise NoSuchLayer("needs gradients, and `forward_only` takes none; take another `collection.fisher`",
                          pointer=POINTER)  # fmt: skip
    modules = [module for module, _ in workspace.inputs.model.named_modules() if module]
    if name not in modules:
        shown = ", ".join(modules[-5:])
        raise NoSuchLayer(f"is `{name}`, which the model does not have; its last modules are {shown}", pointer=POINTER)


def token_importance(name: str | None, workspace: Workspace, whole: FactorSet) -> TokenImportance | None:
    """Write the importance of each row of a head's G as an artifact, and summarise it.

    Memory:
        The layer's factors as they are kept, and 16 V bytes.
    """
    if name is None:
        return None
    facts = next((facts for facts in whole.layers if facts.name == name), None) or _tied(name, whole)
    why = _why_not(name, facts, whole)
    factors = None if why is not None or facts is None else whole.load(facts.ordinal)
    if factors is not None and facts is not None and NEAREST in facts.why and factors.head_diagonal is None:
        why = "these factors are from before the diagonal of a tied head's own G was kept"
    if why is not None or facts is None or factors is None:
        blank = dict.fromkeys(TokenImportance.__dataclass_fields__)
        return TokenImportance(**{**blank, "layer": name, "why": why})  # type: ignore[arg-type]
    diagonal = gradient_diagonal(factors)
    artifact = f"token_importance/{facts.ordinal}.safetensors"
    workspace.ports.artifacts.save_tensors(artifact, {"importance": diagonal}, {"layer": facts.name})
    ordered = torch.sort(diagonal, descending=True, stable=True)
    carried = ordered.values.cumsum(0)
    trace = float(carried[-1])
    return TokenImportance(
        layer=name,
        why=None,
        tokens=diagonal.numel(),
        artifact=artifact,
        trace=trace,
        tokens_for_99_percent=int((carried < _SHARE * trace).sum()) + 1 if trace > 0 else 0,
        most=tuple(int(place) for place in ordered.indices[:_MOST]),
    )


def gradient_diagonal(factors: Factors) -> Tensor:
    """Return the diagonal of a head's G without making G dense.

    Args:
        factors: The layer's factors; a tied head carries the diagonal of its own G beside them.

    Returns:
        The diagonal, shape ``(V,)``, float64, on the host, scale multiplied in.
    """
    if factors.head_diagonal is not None:
        return factors.head_diagonal.to("cpu", torch.float64)
    # what is stored is not handed out
    return factors.side_G.diagonal().clone()


def _tied(name: str, whole: FactorSet) -> LayerFacts | None:
    """The layer of a table that holds the weight of the head ``name``, by whichever of their names it goes."""
    return next((each for each in whole.layers if NEAREST in each.why and f"`{name}`" in each.why), None)


def _why_not(name: str, facts: LayerFacts | None, whole: FactorSet) -> str | None:
    """Why the layer has no diagonal of a head's G; None where it has."""
    if facts is None:
        declared = next((layer for layer in whole.declared if layer.name == name), None)
        if declared is not None:
            return f"the layer is not covered: {declared.reason}"
        return "no covered layer has that name"
    if whole.collection.fisher == "forward_only":
        return "G is the identity under `forward_only`"
    return None
