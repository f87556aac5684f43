"""Factor files: a factor set as artifacts, one file for each layer, and an index that is written last."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Literal
from weakref import WeakValueDictionary

from torch import Tensor

from engine.artifacts import Artifacts
from engine.errors import BrokenFactors
from engine.factors.factor_index import FORMAT, INDEX, LayerEntry, read_index
from engine.factors.factor_set import CollectionCounts, CollectionFacts, Corrected, FactorSet, LayerFacts
from engine.factors.kronecker_factors import (
    Factors,
    TiedParts,
    digest,
    packed,
    require_bias_column,
    unpacked,
)
from engine.factors.representation import read_structured
from engine.layers.tied import NEAREST
from engine.linalg.linear_operator import Structured

RUN = "factors/run.json"
_RUN = ("device", "storage_policy", "planned_peak_bytes")


def factor_file(ordinal: int) -> str:
    """Return the path of the artifact that holds one layer's factors, by the ordinal among covered layers, from 0."""
    return f"factors/{ordinal}.safetensors"


def nested_file(eighths: int, ordinal: int) -> str:
    """Return the path of the artifact that holds one layer's factors of a part of the data: 1, 2 or 4 eighths."""
    return f"nested/{eighths}/{ordinal}.safetensors"


def write_factors(
    artifacts: Artifacts,
    facts: LayerFacts,
    factors: Factors,
    name: str | None = None,
    corrected: Corrected | None = None,
    stored: Mapping[Literal["A", "G"], Tensor | Structured] = MappingProxyType({}),
) -> None:
    """Write one layer's packed triangles and its correction; tensors of a shared A are written once, with its leader.

    Args:
        artifacts: Where to write.
        factors: Its A and G.
        name: Name of the artifact; None is ``factor_file``'s.
        corrected: EK-FAC's correction; None without one.
        stored: Those of A and G that are on the host as they are stored already (``Departed.stored``).
    """
    side = stored.get("G")
    kept = factors.side_G if side is None or isinstance(side, Tensor) else side
    tensors = {"gradient_covariance": side} if isinstance(side, Tensor) else kept.tensors()
    if facts.shared_A_with is None:
        known = stored.get("A")
        tensors["activation_covariance"] = known if isinstance(known, Tensor) else packed(factors.A)
    if factors.head_diagonal is not None:
        tensors["head_diagonal"] = factors.head_diagonal
        tensors |= {} if factors.tied is None else factors.tied.stored()
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
        **kept.metadata(),
    }
    artifacts.save_tensors(name or factor_file(facts.ordinal), tensors, metadata)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The index's values for one layer's stored tensors."""

    digest_A: str
    digest_G: str
    scale_A: float
    scale_G: float
    metadata_G: Mapping[str, str]
    """Metadata that reading a structured G needs besides its tensors; empty for a dense one."""
    ekfac: Mapping[str, str]
    """Digests of EK-FAC's tensors, by the names that they are stored by."""


def write_index(artifacts: Artifacts, collected: FactorSet, kept: Mapping[int, Kept], name: str = INDEX) -> None:
    """Write the index, after all factors: its presence says that they are complete.

    Args:
        artifacts: Where to write.
        kept: Digests and scales of each layer's stored tensors, by ordinal.
        name: Name of the artifact.
    """
    layers = []
    for facts in collected.layers:
        own = kept[facts.ordinal]
        layers.append(
            asdict(facts)
            | {
                "activation_covariance": {
                    "file": f"{facts.leader}.safetensors",
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
                name: {"file": f"{_file_of(name, facts)}.safetensors", "sha256": sha256}
                for name, sha256 in own.ekfac.items()
            }
        )
    artifacts.save_json(
        name,
        {
            "format": FORMAT,
            "collection": asdict(collected.collection),
            "woodbury": asdict(collected.woodbury),
            **{each.name: getattr(collected, each.name) for each in fields(CollectionCounts)},
            "looked_at": None if collected.looked_at is None else asdict(collected.looked_at),
            "parameters": None if collected.parameters is None else [asdict(each) for each in collected.parameters],
            "layers": layers,
            "declared": [asdict(layer) for layer in collected.declared],
            "counted": None if collected.counted is None else asdict(collected.counted),
            "entered": None if collected.entered is None else asdict(collected.entered),
        },
    )


def read_factors(artifacts: Artifacts) -> FactorSet:
    """Open the factors that an earlier job kept; the tensors are read when they are asked for.

    Args:
        artifacts: The artifacts of that job.

    Returns:
        A factor set whose ``load`` reads files, and verifies each tensor by its digest.

    Raises:
        BrokenFactors: If there is no index, it is not of this format, or a value of it cannot be.
    """
    try:
        index = read_index(artifacts.load_json(INDEX))
    except FileNotFoundError as error:
        raise BrokenFactors(
            f"there is no `{INDEX}`; give the folder that a job with `keep: [factors]` wrote", pointer="/factors"
        ) from error
    entries = {entry.facts.ordinal: entry for entry in index.layers}
    held: _Held = WeakValueDictionary()
    return FactorSet(
        layers=tuple(entry.facts for entry in index.layers),
        **{each.name: getattr(index, each.name) for each in fields(CollectionFacts)},
        device="cpu",
        storage_policy="stored",
        planned_peak_bytes=None,
        not_replayed=(),
        load=lambda ordinal: _load(artifacts, entries[ordinal], held),
        load_corrected=(lambda ordinal: _load_corrected(artifacts, entries[ordinal]))
        if index.collection.ekfac
        else None,
        nested=(),
    )


def read_layer(
    artifacts: Artifacts, facts: LayerFacts, name: Callable[[int], str], metadata_G: Mapping[str, str]
) -> Factors:
    """Read one layer's factors from files that no index names, such as those of a smaller sample.

    Args:
        artifacts: Where they are.
        name: Returns the file of an ordinal.
        metadata_G: Strings that reading a structured G takes besides its tensors.

    Returns:
        The factors, on the host.

    Raises:
        BrokenFactors: If a file is missing, or a tensor has another shape.
    """
    file = name(facts.ordinal)
    return Factors(
        layer=facts.name,
        form=facts.form,
        bias=facts.bias,
        A=_activation(artifacts, facts, name(facts.leader)),
        G=_gradient(artifacts, facts, metadata_G, file),
        **_beside(artifacts, facts, file),
    )


def write_run(artifacts: Artifacts, collected: FactorSet) -> None:
    """Write the facts of the run that a job's rows repeat when it reuses these factors."""
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


def _load(artifacts: Artifacts, entry: LayerEntry, held: "_Held") -> Factors:
    facts = entry.facts
    # layers with one A are read one after another, and while the first is in use its A is not read again
    activation = held.get(facts.leader)
    fresh = activation is None
    if activation is None:
        activation = _activation(artifacts, facts, factor_file(facts.leader))
        held[facts.leader] = activation
    factors = Factors(
        layer=facts.name,
        form=facts.form,
        bias=facts.bias,
        A=activation,
        G=_gradient(artifacts, facts, entry.metadata_G, factor_file(facts.ordinal)),
        scale_A=entry.scale_A,
        scale_G=entry.scale_G,
        **_beside(artifacts, facts, factor_file(facts.ordinal)),
    )
    if fresh:
        _require_recorded(entry, "activation_covariance", facts.leader, factors.A)
    _require_recorded(entry, "gradient_covariance", facts.ordinal, factors.G)
    return factors


def _beside(artifacts: Artifacts, facts: LayerFacts, file: str) -> dict[str, Any]:
    """Return the parts of the product of a head and its table; a set from before they were kept has none."""
    if NEAREST not in facts.why:
        return {}
    stored = artifacts.load_tensors(file)
    tied = TiedParts.read(stored, in_dim=facts.in_dim, bias=facts.bias)
    return {"head_diagonal": stored.get("head_diagonal"), "tied": tied}


_Held = WeakValueDictionary[int, Tensor]
"""A by the ordinal of the layer that holds it, for as long as it is in use."""


def _activation(artifacts: Artifacts, facts: LayerFacts, file: str) -> Tensor:
    """A (in_dim, in_dim), or its diagonal."""
    stored = _tensor(artifacts, facts, file, "activation_covariance")
    expected = (facts.in_dim,) if facts.form == "diagonal" else (facts.in_dim * (facts.in_dim + 1) // 2,)
    require_bias_column(facts.name, "the stored A (packed)", tuple(stored.shape), expected, bias=facts.bias)
    return stored if facts.form == "diagonal" else unpacked(stored, facts.in_dim)


def _require_recorded(entry: LayerEntry, name: str, ordinal: int, found: Tensor | Structured) -> None:
    recorded = entry.digests.get(name)
    if recorded is not None and digest(found) != recorded:
        raise _broken(
            entry.facts,
            f"`{name}` of `{factor_file(ordinal)}` is not what `{INDEX}` records; collect the factors again",
        )


def _broken(facts: LayerFacts, said: str) -> BrokenFactors:
    return BrokenFactors(f"layer `{facts.name}`: {said}", layer=facts.name, pointer="/factors")


def _gradient(artifacts: Artifacts, facts: LayerFacts, metadata_G: Mapping[str, str], file: str) -> Tensor | Structured:
    if facts.representation_G == "dense":
        stored = _tensor(artifacts, facts, file, "gradient_covariance")
        if facts.form != "diagonal_block":
            return unpacked(stored, facts.out_dim)
        if stored.shape != (facts.out_dim,):
            said = f"the stored diagonal of G holds {tuple(stored.shape)} numbers instead of {facts.out_dim}"
            raise _broken(facts, said)
        return stored
    try:
        tensors = artifacts.load_tensors(file)
    except FileNotFoundError as error:
        raise _broken(facts, f"`{file}` is missing") from error
    side = read_structured(facts.representation_G, tensors, metadata_G)
    if side.size != facts.out_dim:
        raise _broken(facts, f"the stored G has {side.size} rows instead of {facts.out_dim}")
    return side


def _load_corrected(artifacts: Artifacts, entry: LayerEntry) -> Corrected:
    facts = entry.facts
    own = artifacts.load_tensors(factor_file(facts.ordinal))
    corrected = Corrected(
        eigenvectors_A=_tensor(artifacts, facts, factor_file(facts.leader), "eigenvectors_A")
        if facts.form == "kronecker"
        else None,
        eigenvectors_G=own.get("eigenvectors_G"),
        eigenvalues=_tensor(artifacts, facts, factor_file(facts.ordinal), "corrected_eigenvalues"),
    )
    for name, tensor in corrected.stored(own_a=True).items():
        _require_recorded(entry, name, _file_of(name, facts), tensor)
    return corrected


def _file_of(name: str, facts: LayerFacts) -> int:
    """Ordinal of the file that holds one of EK-FAC's tensors."""
    return facts.leader if name == "eigenvectors_A" else facts.ordinal


def _tensor(artifacts: Artifacts, facts: LayerFacts, file: str, name: str) -> Tensor:
    try:
        found = artifacts.load_tensors(file)[name]
    except (FileNotFoundError, KeyError) as error:
        raise _broken(facts, f"`{file}` is missing or holds no `{name}`") from error
    if not found.is_floating_point():
        said = f"`{name}` of `{file}` must hold floating-point numbers (got {found.dtype}); collect the factors again"
        raise _broken(facts, said)
    return found
