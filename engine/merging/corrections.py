"""Corrections of parts: EK-FAC's eigenvalues over disjoint examples, in one basis, become those over all.

The eigenvalues ``λ_ij = Σ_n (Q_Gᵀ ∇W ℓ_n Q_A)²_ij / w`` are means over loss terms, so that parts with the counts
``w_k`` add up as ``Σ w_k λ_k / Σ w_k``, if all of them rotate into the same basis. That is the basis of the factors of
all examples, which is decomposed once and handed to every part: where eigenvalues coincide, or another library
computes them, another basis is as good, and its eigenvalues are others.

References:
    George et al. (2018), Fast approximate natural gradient descent in a Kronecker-factored eigenbasis
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from catalog.record import canonical_json
from engine.artifacts import Artifacts
from engine.errors import BrokenFactors, NotMergeable
from engine.factors.factor_index import TABLES
from engine.factors.factor_set import CalledOnce, Corrected, FactorSet, Run
from engine.factors.kronecker_factors import Factors, digest
from engine.merging.example_runs import joined, overlap
from engine.merging.weighted_sides import added

BASES = "factors/bases/bases.json"
CORRECTIONS = "factors/corrections/corrections.json"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _Basis:
    """The bases of one layer."""

    name: str
    ordinal: int
    holder: int
    """Ordinal of the layer whose A, and so whose Q_A, this is."""
    digests: tuple[str, ...]
    """Digests of Q_G, and of Q_A where the layer holds one."""


@dataclass(frozen=True, kw_only=True)
class _Bases:
    """The table of all bases."""

    model: str
    layers: tuple[_Basis, ...]
    unmasked: tuple[CalledOnce, ...]
    overwritten: tuple[str, ...]

    def sha256(self) -> str:
        """Digest of all bases."""
        return hashlib.sha256(canonical_json(asdict(self)).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class _Corrected:
    """The correction of one layer over a part."""

    name: str
    ordinal: int
    weight: float
    """Loss terms that its eigenvalues were divided by, weighted."""
    digest: str


@dataclass(frozen=True, kw_only=True)
class _Corrections:
    """The table of a part's corrections."""

    bases: str
    """Digest of the bases that they are in."""
    begin: int
    runs: tuple[Run, ...]
    layers: tuple[_Corrected, ...]


@dataclass(frozen=True, kw_only=True)
class MergedBases:
    """The stored eigenbases of the factors of all examples."""

    artifacts: Artifacts
    table: _Bases

    @property
    def holders(self) -> dict[str, int]:
        """Ordinal of the layer that holds Q_A, by layer."""
        return {layer.name: layer.holder for layer in self.table.layers}

    @property
    def ordinals(self) -> dict[str, int]:
        """Ordinal of each layer that has bases, by name."""
        return {layer.name: layer.ordinal for layer in self.table.layers}

    def load_A(self, name: str) -> Tensor:  # noqa: N802 - the field's own symbol
        """Return Q_A (in_dim, in_dim) of a layer with a dense A, on the host."""
        return self._load(self.holders[name], "eigenvectors_A", 1)

    def load_G(self, name: str) -> Tensor:  # noqa: N802 - the field's own symbol
        """Return Q_G (out_dim, out_dim) of a layer, on the host."""
        return self._load(self.ordinals[name], "eigenvectors_G", 0)

    def require_all(self, names: Iterable[str]) -> None:
        """Require that a part found every layer that has bases; ``NotMergeable`` if one is missing."""
        missing = sorted(set(self.ordinals) - set(names))
        if missing:
            raise NotMergeable(
                f"layer `{missing[0]}` was collected, and is not found again for its correction; a factory must make "
                "the same model each time",
                layer=missing[0],
                pointer="/model",
            )

    def require_model(self, model: str) -> None:
        """Require the model that the factors were collected of, by the digest of its numbers.

        ``NotMergeable`` if it is another; the message names both digests.
        """
        if model != self.table.model:
            raise NotMergeable(
                f"the correction is of another model than the factors: its numbers have the digest {model[:16]}…, and "
                f"{self.table.model[:16]}… those of the factors; a factory must make the same model each time",
                pointer="/model",
            )

    def _load(self, ordinal: int, name: str, place: int) -> Tensor:
        entry = next(layer for layer in self.table.layers if layer.ordinal == ordinal)
        return _verified(self.artifacts, _basis_file(ordinal), name, entry.digests[place])


@dataclass(kw_only=True)
class CorrectionFiles:
    """Writes the corrections of one part, a layer at a time."""

    artifacts: Artifacts
    bases: MergedBases
    _layers: list[_Corrected] = field(default_factory=list)

    def write(self, name: str, eigenvalues: Tensor, weight: float) -> None:
        """Write one layer's eigenvalues (out_dim, in_dim), on the host.

        ``weight`` is the loss terms that they were divided by, weighted.
        """
        ordinal, own = self.bases.ordinals[name], eigenvalues.contiguous()
        self.artifacts.save_tensors(_correction_file(ordinal), {"corrected_eigenvalues": own}, {})
        self._layers.append(_Corrected(name=name, ordinal=ordinal, weight=weight, digest=digest(own)))

    def close(self, runs: Sequence[Sequence[int]], *, begin: int) -> None:
        """Write the table, which says that all are there: runs of indices, and how many of the data come before."""
        table = _Corrections(
            bases=self.bases.table.sha256(),
            begin=begin,
            runs=tuple(Run(begin=first, end=last) for first, last in runs),
            layers=tuple(self._layers),
        )
        self.artifacts.save_json(CORRECTIONS, asdict(table))


def write_bases(artifacts: Artifacts, whole: FactorSet, decompose: Callable[[Tensor, str], Tensor]) -> None:
    """Write the eigenbases of every layer that needs a correction; an exact block has its own.

    ``decompose`` returns the eigenvectors (n, n) of a dense factor of a layer, by its name. ``NotMergeable`` if the set
    does not say which examples it is over. One layer's factors and eigenvectors are held.
    """
    if whole.counted is None:
        raise NotMergeable("the factors do not say which examples they are over; collect them again")
    dtype = torch.float64 if whole.collection.dtype == "float64" else torch.float32
    layers = []
    for facts in whole.layers:
        if facts.form not in ("kronecker", "diagonal"):
            continue
        factors = whole.load(facts.ordinal)
        found = {"eigenvectors_G": decompose(factors.dense_G, facts.name).to("cpu", dtype)}
        if facts.form == "kronecker" and facts.shared_A_with is None:
            found["eigenvectors_A"] = decompose(factors.A, facts.name).to("cpu", dtype)
        artifacts.save_tensors(_basis_file(facts.ordinal), found, {})
        layers.append(
            _Basis(
                name=facts.name,
                ordinal=facts.ordinal,
                holder=facts.leader,
                digests=tuple(digest(tensor) for tensor in found.values()),
            )
        )
    counted = whole.counted
    table = _Bases(
        model=counted.model, layers=tuple(layers), unmasked=counted.unmasked, overwritten=counted.overwritten
    )
    artifacts.save_json(BASES, asdict(table))


def join_bases(artifacts: Artifacts, whole: FactorSet, parts: Sequence[Artifacts]) -> None:
    """Write the eigenbases of all layers, which pieces have computed, each of some layers; one layer's are held.

    ``NotMergeable`` if a layer's are missing, ``BrokenFactors`` if a table is missing, or a tensor is not what its
    table records.
    """
    tables = [(part, _table(_Bases, part, BASES)) for part in parts]
    known = {layer.ordinal: (part, layer) for part, table in tables for layer in table.layers}
    layers = []
    for facts in whole.layers:
        if facts.form not in ("kronecker", "diagonal"):
            continue
        part, own = known.get(facts.ordinal, (None, None))
        if part is None or own is None or own.name != facts.name:
            raise NotMergeable(f"no piece has computed the eigenbases of layer `{facts.name}`", layer=facts.name)
        file = _basis_file(facts.ordinal)
        names = ("eigenvectors_G", "eigenvectors_A")[: len(own.digests)]
        found = {name: _verified(part, file, name, sha256) for name, sha256 in zip(names, own.digests, strict=True)}
        artifacts.save_tensors(file, found, {})
        layers.append(own)
    artifacts.save_json(BASES, asdict(replace(tables[0][1], layers=tuple(layers))))


def read_bases(artifacts: Artifacts) -> MergedBases:
    """Open the eigenbases that ``write_bases`` wrote, whose tensors are read when they are asked for.

    ``BrokenFactors`` if the table is missing, or a value of it cannot be.
    """
    return MergedBases(artifacts=artifacts, table=_table(_Bases, artifacts, BASES))


def merge_corrections(
    whole: FactorSet,
    bases: Artifacts,
    parts: Sequence[Artifacts],
    correct_block: Callable[[Factors], Corrected],
) -> FactorSet:
    """Return merged factors with EK-FAC's correction over all of their examples, by ``load_corrected``.

    ``bases`` has their eigenbases, ``parts`` the corrections of each part, in the order of their sums;
    ``correct_block`` returns the correction of an exact block, which needs no pass.

    Raises:
        NotMergeable: If the parts were made in other bases, or are not over the examples of the factors, each once.
        BrokenFactors: If a table is missing, or a value of it cannot be.
    """
    known = read_bases(bases)
    tables = [_table(_Corrections, part, CORRECTIONS) for part in parts]
    _require_same_examples(whole, known, tables)

    def load(ordinal: int) -> Corrected:
        facts = whole.layers[ordinal]
        if facts.form not in ("kronecker", "diagonal"):
            return correct_block(whole.load(ordinal))
        total, weight = None, 0.0
        for part, table in zip(parts, tables, strict=True):
            entry = next(each for each in table.layers if each.ordinal == ordinal)
            own = _verified(part, _correction_file(ordinal), "corrected_eigenvalues", entry.digest)
            total, weight = added(total, own, entry.weight), weight + entry.weight
        if total is None:
            raise ValueError("a merge of no set")
        G = known.load_G(facts.name)
        return Corrected(
            eigenvectors_A=known.load_A(facts.name) if facts.form == "kronecker" else None,
            eigenvectors_G=G,
            eigenvalues=total.div_(weight or 1.0).to(G.dtype),
        )

    return replace(whole, load_corrected=load, passes=whole.passes + 1)


def _require_same_examples(whole: FactorSet, known: MergedBases, tables: Sequence[_Corrections]) -> None:
    for place, table in enumerate(tables, start=1):
        if table.bases != known.table.sha256():
            raise NotMergeable(
                f"the correction of part {place} was made in other eigenbases; make it again in those of the merged "
                "factors"
            )
        known.require_all(layer.name for layer in table.layers)
    runs = [[run.begin, run.end] for table in tables for run in table.runs]
    twice = overlap(runs)
    if twice is not None:
        raise NotMergeable(f"example {twice} is in two corrections: every example counts once")
    counted = () if whole.counted is None else whole.counted.runs
    if joined(runs) != [[run.begin, run.end] for run in counted]:
        raise NotMergeable(
            f"the corrections are over {sum(end - begin for begin, end in runs)} examples, and the factors over "
            f"{sum(run.end - run.begin for run in counted)}, or over others: every example counts once in both"
        )


def _table(kind: type[T], artifacts: Artifacts, name: str) -> T:
    try:
        return TABLES.read(kind, artifacts.load_json(name), name)  # type: ignore[no-any-return] # by its annotation
    except FileNotFoundError as error:
        raise BrokenFactors(f"there is no `{name}`; make the correction again", pointer="/factors") from error


def _verified(artifacts: Artifacts, file: str, name: str, written: str) -> Tensor:
    try:
        found = artifacts.load_tensors(file)[name]
    except (FileNotFoundError, KeyError) as error:
        raise BrokenFactors(f"`{file}` is missing or holds no `{name}`", pointer="/factors") from error
    if digest(found) != written:
        raise BrokenFactors(f"`{name}` of `{file}` is not what its table records", pointer="/factors")
    return found


def _basis_file(ordinal: int) -> str:
    return f"factors/bases/{ordinal}.safetensors"


def _correction_file(ordinal: int) -> str:
    return f"factors/corrections/{ordinal}.safetensors"
