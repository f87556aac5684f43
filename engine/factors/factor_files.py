"""Factor files: a factor set as artifacts, one file for each layer, and an index that is written last."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any

from torch import Tensor

from catalog.collection import Collection
from catalog.woodbury import Woodbury
from engine.errors import BrokenFactors
from engine.factors.factor_set import FactorSet, LayerFacts
from engine.factors.kronecker_factors import Corrected, Factors, packed, require_bias_column, unpacked
from engine.factors.representation import read_structured
from engine.layers.coverage import DeclaredLayer
from engine.layers.tied import NEAREST
from engine.linalg.linear_operator import Structured
from engine.workspace import Artifacts

FORMAT = "kronoscope-factors/1"
INDEX = "factors/factors.index.json"
RUN = "factors/run.json"
_RUN = ("device", "storage_policy", "planned_peak_bytes")


def factor_file(ordinal: int) -> str:
    """Return the name of the artifact that holds one layer's factors.

    Args:
        ordinal: The layer's place among the covered layers, from 0.

    Returns:
        A path relative to the job's artifacts.
    """
    return f"factors/{ordinal}.safetensors"


def nested_file(eighths: int, ordinal: int) -> str:
    """Return the name of the artifact that holds one layer's factors of a smaller sample.

    Args:
        eighths: Part of the data, in eighths: 1, 2 or 4.
        ordinal: The layer's place among the covered layers, from 0.

    Returns:
        A path relative to the job's artifacts.
    """
    return f"nested/{eighths}/{ordinal}.safetensors"


def write_factors(
    artifacts: Artifacts,
    facts: LayerFacts,
    factors: Factors,
    name: str | None = None,
    corrected: Corrected | None = None,
) -> None:
    """Write one layer's packed triangles and its correction; tensors of a shared A are written once, with its leader.

    Args:
        artifacts: Where to write.
        facts: The layer.
        factors: Its A and G.
        name: Name of the artifact; None is ``factor_file``'s.
        corrected: EK-FAC's correction; None without one.
    """
    side = factors.G
    tensors: dict[str, Tensor]
    if isinstance(side, Structured):
        tensors, own = side.tensors(), side.metadata()
    else:
        tensors, own = {"gradient_covariance": packed(side)}, {}
    if facts.shared_A_with is None:
        tensors["activation_covariance"] = packed(factors.A)
    if factors.head_diagonal is not None:
        tensors["head_diagonal"] = factors.head_diagonal
    if corrected is not None:
        tensors |= corrected.stored(own_a=facts.shared_A_with is None)
    metadata = {
        "format": FORMAT,
        "layer": facts.name,
        "form": facts.form,
        "in_dim": str(facts.in_dim),
        "out_dim": str(facts.out_dim),
        "layout": "upper triangle, row by row; a diagonal A or G as its diagonal",
        "dtype": str(factors.A.dtype).removeprefix("torch."),
        "activation_covariance_scale": repr(factors.scale_A),
        "gradient_covariance_scale": repr(factors.scale_G),
        **own,
    }
    artifacts.save_tensors(name or factor_file(facts.ordinal), tensors, metadata)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What the index says of one layer's stored tensors."""

    digest_A: str
    digest_G: str
    scale_A: float
    scale_G: float
    metadata_G: Mapping[str, str]
    """What reading a structured G needs besides its tensors; empty for a dense one."""
    ekfac: Mapping[str, str]
    """Digests of EK-FAC's tensors, by the names that they are stored by."""


def write_index(artifacts: Artifacts, collected: FactorSet, kept: Mapping[int, Kept], name: str = INDEX) -> None:
    """Write the index, after all factors: its presence says that they are complete.

    Args:
        artifacts: Where to write.
        collected: The factor set.
        kept: Digests and scales of each layer's stored tensors, by ordinal.
        name: Name of the artifact.
    """
    layers = []
    for facts in collected.layers:
        holder = facts.ordinal if facts.shared_A_with is None else facts.shared_A_with
        own = kept[facts.ordinal]
        layers.append(
            asdict(facts)
            | {
                "activation_covariance": {
                    "file": f"{holder}.safetensors",
                    "sha256": own.digest_A,
                    "scale": own.scale_A,
                },
                "gradient_covariance": {
                    "file": f"{facts.ordinal}.safetensors",
                    "sha256": own.digest_G,
                    "scale": own.scale_G,
                    "metadata": dict(own.metadata_G),
                },
            }
            | {
                name: {"file": f"{holder if name == 'eigenvectors_A' else facts.ordinal}.safetensors", "sha256": sha256}
                for name, sha256 in own.ekfac.items()
            }
        )
    artifacts.save_json(
        name,
        {
            "format": FORMAT,
            "collection": asdict(collected.collection),
            "woodbury": asdict(collected.woodbury),
            "trainable_parameters": collected.trainable_parameters,
            "examples": collected.examples,
            "updates": collected.updates,
            "passes": collected.passes,
            "micro_batch": collected.micro_batch,
            "nondeterministic": collected.nondeterministic,
            "amp": collected.amp,
            "amp_fallback": collected.amp_fallback,
            "loss_scale": collected.loss_scale,
            "layers": layers,
            "declared": [asdict(layer) for layer in collected.declared],
        },
    )


def read_factors(artifacts: Artifacts) -> FactorSet:
    """Open the factors that an earlier job kept; the tensors are read when they are asked for.

    Args:
        artifacts: The artifacts of that job.

    Returns:
        A factor set whose ``load`` reads files.

    Raises:
        BrokenFactors: If there is no index, or it is not of this format.
    """
    try:
        index = artifacts.load_json(INDEX)
    except FileNotFoundError as error:
        raise BrokenFactors(
            f"there is no `{INDEX}`; give the folder that a job with `keep: [factors]` wrote", pointer="/factors"
        ) from error
    if not isinstance(index, Mapping) or index.get("format") != FORMAT:
        raise BrokenFactors(f"`{INDEX}` is not of the format {FORMAT}", pointer="/factors")
    try:
        layers = tuple(_facts(entry) for entry in index["layers"])
        scales = {int(entry["ordinal"]): _scales(entry) for entry in index["layers"]}
        metadata = {
            int(entry["ordinal"]): dict(_side(entry, "gradient").get("metadata", {})) for entry in index["layers"]
        }
        declared = tuple(
            DeclaredLayer(**{**entry, "parameters": tuple(entry["parameters"])}) for entry in index["declared"]
        )
        collection = Collection(**index["collection"])
        # an index from before there were any has dense ones
        woodbury = Woodbury(**index.get("woodbury", {"policy": "dense"}))
        counts = {name: int(index[name]) for name in ("trainable_parameters", "examples", "updates", "passes")}
    except (KeyError, TypeError, ValueError) as error:
        raise BrokenFactors(f"`{INDEX}` lacks or garbles an entry: {error}", pointer="/factors") from error
    by_ordinal = {facts.ordinal: facts for facts in layers}
    return FactorSet(
        layers=layers,
        declared=declared,
        collection=collection,
        woodbury=woodbury,
        device="cpu",
        storage_policy="stored",
        micro_batch=index.get("micro_batch"),
        amp=index.get("amp", "off"),
        amp_fallback=index.get("amp_fallback"),
        loss_scale=index.get("loss_scale"),
        planned_peak_bytes=None,
        nondeterministic=None if index.get("nondeterministic") is None else tuple(index["nondeterministic"]),
        not_replayed=(),
        load=lambda ordinal: _load(artifacts, by_ordinal[ordinal], scales[ordinal], metadata[ordinal]),
        load_corrected=(lambda ordinal: _load_corrected(artifacts, by_ordinal[ordinal])) if collection.ekfac else None,
        nested=(),
        trainable_parameters=counts["trainable_parameters"],
        examples=counts["examples"],
        updates=counts["updates"],
        passes=counts["passes"],
    )


def write_run(artifacts: Artifacts, collected: FactorSet) -> None:
    """Write the facts of the run that a job's rows repeat when it reuses these factors.

    Args:
        artifacts: Where to write.
        collected: The factor set.
    """
    artifacts.save_json(RUN, {name: getattr(collected, name) for name in _RUN})


def reused(artifacts: Artifacts, source: str) -> FactorSet:
    """Open the factors of a cache, with the facts of the run that collected them.

    Args:
        artifacts: The cached artifacts.
        source: Id of the job that collected them.

    Returns:
        A factor set that names its source.

    Raises:
        BrokenFactors: If there is no index, or it is not of this format.
        FileNotFoundError: If the facts of the run are missing.
    """
    run = artifacts.load_json(RUN)
    return replace(read_factors(artifacts), reused_from=source, **{name: run[name] for name in _RUN})


def _facts(entry: Mapping[str, Any]) -> LayerFacts:
    known = {field.name: field.default for field in fields(LayerFacts)}
    own = {name: entry[name] if default is MISSING else entry.get(name, default) for name, default in known.items()}
    return LayerFacts(**{**own, "parameters": tuple(own["parameters"])})


def _scales(entry: Mapping[str, Any]) -> tuple[float, float]:
    """Of A and of G; an index from before there were any has none."""
    activation, gradient = _side(entry, "activation"), _side(entry, "gradient")
    return float(activation.get("scale", 1.0)), float(gradient.get("scale", 1.0))


def _side(entry: Mapping[str, Any], side: str) -> Mapping[str, Any]:
    return entry.get(f"{side}_covariance") or {}


def _load(artifacts: Artifacts, facts: LayerFacts, scales: tuple[float, float], metadata: Mapping[str, str]) -> Factors:
    holder = facts.ordinal if facts.shared_A_with is None else facts.shared_A_with
    activation = _tensor(artifacts, facts, holder, "activation_covariance")
    expected = (facts.in_dim,) if facts.form == "diagonal" else (facts.in_dim * (facts.in_dim + 1) // 2,)
    require_bias_column(facts.name, "the stored A (packed)", tuple(activation.shape), expected, bias=facts.bias)
    return Factors(
        layer=facts.name,
        form=facts.form,
        bias=facts.bias,
        A=activation if facts.form == "diagonal" else unpacked(activation, facts.in_dim),
        G=_gradient(artifacts, facts, metadata),
        scale_A=scales[0],
        scale_G=scales[1],
        # a set from before it was kept has none
        head_diagonal=artifacts.load_tensors(factor_file(facts.ordinal)).get("head_diagonal")
        if NEAREST in facts.why
        else None,
    )


def _gradient(artifacts: Artifacts, facts: LayerFacts, metadata: Mapping[str, str]) -> Tensor | Structured:
    if facts.representation_G == "dense":
        stored = _tensor(artifacts, facts, facts.ordinal, "gradient_covariance")
        return _diagonal(stored, facts) if facts.form == "diagonal_block" else unpacked(stored, facts.out_dim)
    try:
        tensors = artifacts.load_tensors(factor_file(facts.ordinal))
    except FileNotFoundError as error:
        raise BrokenFactors(
            f"layer `{facts.name}`: `{factor_file(facts.ordinal)}` is missing", layer=facts.name, pointer="/factors"
        ) from error
    side = read_structured(facts.representation_G, tensors, metadata)
    if side.size != facts.out_dim:
        raise BrokenFactors(
            f"layer `{facts.name}`: the stored G has {side.size} rows instead of {facts.out_dim}",
            layer=facts.name,
            pointer="/factors",
        )
    return side


def _load_corrected(artifacts: Artifacts, facts: LayerFacts) -> Corrected:
    holder = facts.ordinal if facts.shared_A_with is None else facts.shared_A_with
    own = artifacts.load_tensors(factor_file(facts.ordinal))
    basis = _tensor(artifacts, facts, holder, "eigenvectors_A") if facts.form == "kronecker" else None
    values = _tensor(artifacts, facts, facts.ordinal, "corrected_eigenvalues")
    return Corrected(eigenvectors_A=basis, eigenvectors_G=own.get("eigenvectors_G"), eigenvalues=values)


def _diagonal(stored: Tensor, facts: LayerFacts) -> Tensor:
    if stored.shape != (facts.out_dim,):
        raise BrokenFactors(
            f"layer `{facts.name}`: the stored diagonal of G holds {tuple(stored.shape)} numbers instead of "
            f"{facts.out_dim}",
            layer=facts.name,
            pointer="/factors",
        )
    return stored


def _tensor(artifacts: Artifacts, facts: LayerFacts, ordinal: int, name: str) -> Tensor:
    try:
        return artifacts.load_tensors(factor_file(ordinal))[name]
    except (FileNotFoundError, KeyError) as error:
        raise BrokenFactors(
            f"layer `{facts.name}`: `{factor_file(ordinal)}` is missing or holds no `{name}`",
            layer=facts.name,
            pointer="/factors",
        ) from error
