"""Part files: a set of factors over a part of the data as artifacts, with all that a merge takes.

Beside the files of any stored set there are the smaller sample sizes that the part reached, under
``factors/nested/``, and the table ``factors/part.json``, which says of each what its sums were divided by. The index
comes last: its presence says that the part is complete.
"""

from dataclasses import asdict, dataclass, replace
from functools import partial

from engine.artifacts import Artifacts
from engine.errors import BrokenFactors
from engine.factors.factor_files import Kept, read_factors, read_layer, write_factors, write_index
from engine.factors.factor_index import TABLES
from engine.factors.factor_set import Corrected, FactorSet, LayerSums, NestedSize
from engine.factors.kronecker_factors import Factors, digest

PART = "factors/part.json"


@dataclass(frozen=True, kw_only=True)
class _Text:
    """A string of a structured G's metadata."""

    name: str
    value: str


@dataclass(frozen=True, kw_only=True)
class _NestedLayer:
    """One layer after the first examples."""

    sums: LayerSums
    metadata_G: tuple[_Text, ...]


@dataclass(frozen=True, kw_only=True)
class _Nested:
    """One smaller sample size."""

    eighths: int
    examples: int
    layers: tuple[_NestedLayer, ...]


@dataclass(frozen=True, kw_only=True)
class _Part:
    """The table."""

    nested: tuple[_Nested, ...]


def write_part(artifacts: Artifacts, collected: FactorSet) -> None:
    """Write a set over a part of the data; one layer's factors and a packed triangle are held.

    ``BrokenFactors`` if a smaller sample size does not say what it sums.
    """
    kept: dict[int, Kept] = {}
    for facts in collected.layers:
        factors = collected.load(facts.ordinal)
        corrected = None if collected.load_corrected is None else collected.load_corrected(facts.ordinal)
        write_factors(artifacts, facts, factors, corrected=corrected)
        kept[facts.ordinal] = kept_of(factors, corrected)
    table = _Part(nested=tuple(_written(artifacts, collected, size) for size in collected.nested))
    artifacts.save_json(PART, asdict(table))
    write_index(artifacts, collected, kept)


def kept_of(factors: Factors, corrected: Corrected | None = None) -> Kept:
    """Return what the index says of one layer's tensors."""
    return Kept(
        digest_A=digest(factors.A),
        digest_G=digest(factors.G),
        scale_A=factors.scale_A,
        scale_G=factors.scale_G,
        metadata_G=factors.side_G.metadata(),
        ekfac={}
        if corrected is None
        else {name: digest(tensor) for name, tensor in corrected.stored(own_a=True).items()},
    )


def read_part(artifacts: Artifacts) -> FactorSet:
    """Open a set over a part of the data, or a finished one; the tensors are read when they are asked for.

    ``BrokenFactors`` if a table is missing, or a value of it cannot be.
    """
    found = read_factors(artifacts)
    if found.counted is None or found.counted.whole is None:
        return found
    try:
        table: _Part = TABLES.read(_Part, artifacts.load_json(PART), "part")
    except FileNotFoundError as error:
        raise BrokenFactors(f"there is no `{PART}`; collect the part again", pointer="/factors") from error
    return replace(found, nested=tuple(_opened(artifacts, found, size) for size in table.nested))


def _file(eighths: int, ordinal: int) -> str:
    return f"factors/nested/{eighths}/{ordinal}.safetensors"


def _written(artifacts: Artifacts, collected: FactorSet, size: NestedSize) -> _Nested:
    layers = []
    for facts, sums in zip(collected.layers, size.sums, strict=True):
        if sums is None:
            raise BrokenFactors(
                f"layer `{facts.name}`: its factors after {size.examples} examples do not say what they sum; collect "
                "the part again",
                layer=facts.name,
            )
        factors = size.load(facts.ordinal)
        write_factors(artifacts, facts, factors, _file(size.eighths, facts.ordinal))
        strings = factors.side_G.metadata()
        layers.append(
            _NestedLayer(sums=sums, metadata_G=tuple(_Text(name=name, value=value) for name, value in strings.items()))
        )
    return _Nested(eighths=size.eighths, examples=size.examples, layers=tuple(layers))


def _opened(artifacts: Artifacts, found: FactorSet, size: _Nested) -> NestedSize:
    if len(size.layers) != len(found.layers):
        raise BrokenFactors(
            f"`{PART}` has {len(size.layers)} layers, and the index {len(found.layers)}; collect the part again",
            pointer="/factors",
        )

    def load(ordinal: int) -> Factors:
        strings = {text.name: text.value for text in size.layers[ordinal].metadata_G}
        return read_layer(artifacts, found.layers[ordinal], partial(_file, size.eighths), strings)

    return NestedSize(
        eighths=size.eighths,
        examples=size.examples,
        rank_bounds=(),
        load=load,
        sums=tuple(layer.sums for layer in size.layers),
    )
