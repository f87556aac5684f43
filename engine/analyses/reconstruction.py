"""`reconstruction`: each layer's factors with their spectra clipped at κ_max, rebuilt or kept as an eigenbasis."""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from catalog.analyses.reconstruction import (
    ReconstructedSide,
    ReconstructionMetrics,
    ReconstructionParams,
    ReconstructionSummary,
)
from catalog.responses.layer_record import Observed
from engine.analyses.costs.reconstruction import reconstruction_cost
from engine.analyses.layer_analysis import LayerAnalysis
from engine.analyses.remembered_rows import Outcome, recall, remember
from engine.artifacts import Artifacts
from engine.errors import BrokenFactors, NoConditionNumber
from engine.factors.clipping.clipped_inverse import PREFIX
from engine.factors.dense import Dense
from engine.factors.factor_files import Kept, write_factors, write_index
from engine.factors.factor_set import GIVEN_MATRIX
from engine.factors.kronecker_factors import Factors, packed
from engine.linalg.eigenbasis import ClippedSide
from engine.linalg.eigendecomposition import kept_dtype
from engine.linalg.eigensolvers import LARGEST
from engine.linalg.linear_operator import Operator
from engine.linalg.panels import wide_product
from engine.measurement.clip_factor import (
    DecomposedFactor,
    Made,
    clip_structured,
    in_eigenbasis,
    not_stabilised,
    rebuild,
)
from engine.measurement.divided_layers import DividedLayers, SentFiles
from engine.measurement.layer_measurement import Measured
from engine.memory.budget import device_bytes, resident_bytes

FOLDER = "stabilised"
FORMAT = "kronoscope-stabilised/1"
INDEX = f"{FOLDER}/stabilised.index.json"


class Reconstruction(LayerAnalysis[ReconstructionParams]):
    """Each layer's factors, stabilised; a layer that shares an A comes after the layer that holds it.

    Memory:
        One layer's factors, their stabilised copies and one basis.
    """

    kind = "reconstruction"
    cost = staticmethod(reconstruction_cost)
    divided = True

    @override
    def require(self) -> None:
        if self.workspace.options.stabilisation.kappa_max is None:
            raise NoConditionNumber(
                "`stabilisation.kappa_max` is null, so there is nothing to clip at; give a number above 1, such as 1e6",
                pointer="/stabilisation/kappa_max",
            )

    @override
    def prepare(self) -> None:
        division = DividedLayers.of(self.workspace, self.whole)
        if division is not None:
            self.files = SentFiles(division=division, places=[self.workspace.ports.artifacts])
        self._kappa_max = self.workspace.options.stabilisation.kappa_max or math.inf
        self._artifacts: Artifacts = self.files or self.workspace.ports.artifacts
        self._shared: dict[int, ReconstructedSide] = {}
        """A of layers that others share it with, by ordinal."""
        self._kept: dict[int, Kept] = {}
        self._entries: dict[int, dict[str, Any]] = {}
        """Entries of the index, by ordinal."""

    @override
    def layers(self) -> Iterator[Measured]:
        held: set[int] = set()
        waiting: dict[int, list[Measured]] = {}
        for layer in super().layers():
            holder = layer.facts.shared_A_with
            if holder is not None and holder not in held:
                waiting.setdefault(holder, []).append(layer)
                continue
            held.add(layer.facts.ordinal)
            yield layer
            yield from waiting.pop(layer.facts.ordinal, [])
        if waiting:
            raise ValueError(f"layers {sorted(waiting)} hold an A and are not among those measured")

    @override
    def layer(self, layer: Measured) -> Outcome:
        facts = layer.facts
        outcome = recall(self.workspace, facts)
        if outcome is None:
            metrics = self._stabilised(layer)
            kept, entry = self._kept.get(facts.ordinal), self._entries.get(facts.ordinal)
            outcome = Outcome(metrics=metrics, kept=kept, entry=entry)
            remember(self.workspace, facts, outcome)
        # the next layer may share its A
        self.take(layer, outcome)
        return outcome

    @override
    def take(self, layer: Measured, outcome: Outcome) -> ReconstructionMetrics:
        facts = layer.facts
        if outcome.kept is not None:
            self._kept[facts.ordinal] = outcome.kept
        if outcome.entry is not None:
            self._entries[facts.ordinal] = outcome.entry
        if outcome.metrics.A is not None and facts.shared_A_with is None:
            self._shared[facts.ordinal] = outcome.metrics.A
        return outcome.metrics

    @override
    def observe(self, layer: Measured, begun: float) -> Observed:
        machine = self.workspace.machine
        allocated, reserved = device_bytes(machine.device)
        return replace(
            layer.observed,
            seconds=time.perf_counter() - begun,
            allocated_after_bytes=allocated,
            reserved_after_bytes=reserved,
            host_after_bytes=resident_bytes(),
            measured_peak_bytes=machine.curve.stages.peak_bytes(machine.device),
        )

    @override
    def summary(self) -> ReconstructionSummary:
        own: list[ReconstructedSide] = []
        lacking = []
        for facts in self.whole.layers:
            row = self.measured[facts.ordinal]
            sides = [side for side in (row.A if facts.shared_A_with is None else None, row.G) if side is not None]
            own += [side for side in sides if side.why is None]
            if any(side.why is not None for side in sides):
                lacking.append(facts.name)
        eigenvalues = sum(side.size for side in own)
        clipped = sum(side.clipped or 0 for side in own)
        before = sum(side.trace or 0 for side in own)
        kappas = [side.kappa_reached for side in own if side.floor]
        errors = [side.relative_error for side in own if side.relative_error is not None]
        reached = [kappa for kappa in kappas if kappa is not None]
        return ReconstructionSummary(
            coverage=self.coverage,
            layers=len(self.whole.layers),
            branches=self.branches,
            factors=len(own),
            kappa_max=self._kappa_max,
            route=self.params.route,
            clipped=clipped,
            eigenvalues=eigenvalues,
            clipped_share=clipped / eigenvalues if eigenvalues else None,
            mass_share=sum(side.mass or 0 for side in own) / before if before > 0 else None,
            floor_kept=min(
                ((side.floor_reached or 0.0) / side.floor for side in own if side.clipped and side.floor), default=None
            ),
            kappa_reached=None if None in kappas else max(reached, default=None),
            relative_error=max(errors, default=None),
            not_stabilised=tuple(lacking),
        )

    def _stabilised(self, layer: Measured) -> ReconstructionMetrics:
        facts, params = layer.facts, self.params
        factors = self.whole.load(facts.ordinal)
        made_a = made_g = None
        side_a = None if facts.shared_A_with is None else self._shared.get(facts.shared_A_with)
        if params.sides != "G" and facts.shared_A_with is None and facts.form not in ("block", "diagonal_block"):
            made_a = self._made(layer, factors.side_A, "A")
            self._shared[facts.ordinal] = side_a = made_a.side
        if params.sides != "A":
            made_g = self._made(layer, factors.side_G, "G")
        side_g = None if made_g is None else made_g.side
        artifact = None
        if params.keep_matrices and facts.module == GIVEN_MATRIX:
            artifact = f"{FOLDER}/matrix.safetensors"
            self._write_given(layer, made_g, artifact)
        elif params.keep_matrices:
            artifact = f"{FOLDER}/{facts.ordinal}.safetensors"
            self._write(layer, factors, {"A": made_a, "G": made_g}, artifact)
        for side in (side_a, side_g):
            if side is not None and side.floor_reached is not None and side.floor_reached < 0.5 * (side.floor or 0):
                self.workspace.ports.log(
                    "warning",
                    f"layer `{facts.name}`: the smallest eigenvalue came out as {side.floor_reached:.3g} for a "
                    f"floor of {side.floor:.3g}: the factors' precision can not hold κ_max = {self._kappa_max:.3g}; "
                    "take `collection.dtype: float64`, or `reconstruction.route: eigenbasis`",
                )
        return ReconstructionMetrics(
            form=facts.form,
            kappa_max=self._kappa_max,
            A=side_a if params.sides != "G" else None,
            G=side_g,
            shared_A_with=None if facts.shared_A_with is None else self.whole.layers[facts.shared_A_with].name,
            artifact=artifact,
        )

    def _made(self, layer: Measured, kept: Operator, side: Literal["A", "G"]) -> Made:
        """One side by the route that was asked for; one that is never made dense as an eigenbasis or operator."""
        spectrum = layer.A.spectrum if side == "A" else layer.G.spectrum
        name = layer.facts.name
        if not isinstance(kept, Dense):
            return clip_structured(layer, kept, self._kappa_max)
        factor, scale = kept.stored, kept.scale
        wide = kept_dtype(factor.dtype)
        if spectrum is None:
            return not_stabilised(kept.size, "matrix", f"it has more than the {LARGEST} rows that eigensolvers take")
        if kept.is_diagonal and self.params.route == "eigenbasis":
            return in_eigenbasis(kept.diagonal(), None, self._kappa_max, wide, kind="diagonal")
        if kept.is_diagonal:
            values, vectors = torch.sort(factor.to(torch.float64)).values, None
        else:
            basis = layer.load_basis(side)
            # another analysis of the job may have them wider
            values, vectors = basis.values / scale, None if basis.vectors is None else basis.vectors.to(wide)
        given = None
        if layer.facts.module == GIVEN_MATRIX and vectors is not None:
            scale, values = 1.0, (given := self._given_values(name, factor, values.clone(), vectors))
        if self.params.route == "eigenbasis":
            made = in_eigenbasis(values * scale, vectors, self._kappa_max, wide, kind="matrix")
        else:
            decomposed = DecomposedFactor(layer=name, factor=factor, scale=scale, values=values, vectors=vectors)
            made = rebuild(self.workspace, decomposed, self._kappa_max, self.params.placement)
        return replace(made, side=replace(made.side, smallest=float(values[0]))) if given is not None else made

    def _given_values(self, name: str, factor: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
        """Eigenvalues of a matrix that no collection made, which may be indefinite: decompositions cut off at zero."""
        cut = int((values <= 0).sum())
        if cut:
            columns = vectors[:, :cut].to(torch.float64)
            # kept in float32, they are of length 1 to its rounding only
            squares = columns.square().sum(0)
            values[:cut] = ((columns * wide_product(factor, columns)).sum(0) / squares).sort().values
        if float(values[-1]) <= 0 and float(values[0]) < 0:
            raise BrokenFactors(
                f"`{name}` has no positive eigenvalue, so λ_max/κ_max cannot be a floor; did you mean its negative?",
                layer=name,
                pointer="/factors/path",
            )
        rounding = factor.shape[0] * torch.finfo(factor.dtype).eps * float(values[-1])
        if float(values[0]) < -rounding:
            self.workspace.ports.log(
                "warning",
                f"`{name}` is indefinite: the smallest eigenvalue is {float(values[0]):.3g}, and what lies below zero "
                f"by more than rounding numbers {int((values < -rounding).sum())}; it is raised to the floor like the "
                "rest",
            )
        return values

    def _write(
        self, layer: Measured, factors: Factors, made: Mapping[Literal["A", "G"], Made | None], name: str
    ) -> None:
        """One layer's file: packed triangles as a collection writes them, wherever both sides are matrices."""
        facts, artifacts = layer.facts, self._artifacts
        contents = {side: each.content for side, each in made.items() if each is not None}
        matrices: dict[str, Any] = {side: each for side, each in contents.items() if isinstance(each, Tensor)}
        scales = {"A": factors.scale_A, "G": factors.scale_G}
        self._entries[facts.ordinal] = {
            "ordinal": facts.ordinal,
            "name": facts.name,
            "form": facts.form,
            "holder_of_A": facts.leader,
            "sides": {
                side: each.entry()
                if isinstance(each, ClippedSide)
                else {
                    "kind": "none" if each is None else "matrix",
                    "floor": None,
                    "scale": 1.0 if each is None else scales[side],
                }
                for side, each in contents.items()
            },
        }
        if self.params.route == "rebuild" and factors.side_G.kind == "dense":
            write_factors(artifacts, facts, replace(factors, head_diagonal=None, **matrices), name)
            record = layer.record
            digests = {side: each.side.digest for side, each in made.items() if each is not None}
            shared = self._shared.get(facts.leader)
            self._kept[facts.ordinal] = Kept(
                digest_A=str(record.digest_A if shared is None else shared.digest),
                digest_G=str(digests.get("G") or record.digest_G),
                scale_A=factors.scale_A,
                scale_G=factors.scale_G,
                ekfac={},
                metadata_G={},
            )
            return
        tensors: dict[str, Tensor] = {}
        for side, content in contents.items():
            if isinstance(content, ClippedSide):
                tensors |= content.tensors(PREFIX[side])
            elif isinstance(content, Tensor):
                tensors[f"{PREFIX[side]}_covariance"] = packed(content)
        artifacts.save_tensors(name, tensors, {"format": FORMAT, "layer": facts.name})

    def _write_given(self, layer: Measured, made: Made | None, name: str) -> None:
        """A matrix of the caller's comes back as it came: square, under its own name."""
        if made is None or made.content is None:
            return
        content, name_of = made.content, layer.facts.name
        tensors = {name_of: content} if isinstance(content, Tensor) else content.tensors(name_of)
        side = {
            "kind": "matrix" if isinstance(content, Tensor) else "eigenbasis",
            "floor": made.side.floor,
            "scale": 1.0,
            "stored_as": name_of,
        }
        self._entries[layer.facts.ordinal] = {
            "ordinal": layer.facts.ordinal,
            "name": layer.facts.name,
            "form": layer.facts.form,
            "holder_of_A": layer.facts.ordinal,
            "file": name.removeprefix(f"{FOLDER}/"),
            "sides": {"G": side},
        }
        metadata = {"format": FORMAT, "kappa_max": repr(self._kappa_max), "floor": repr(made.side.floor)}
        self._artifacts.save_tensors(name, tensors, metadata)

    @override
    def finish(self) -> None:
        """Indices last, so that their presence says that all is there.

        Where every side is a matrix, they are factors as a collection leaves them, for their readers.
        """
        artifacts, layers = self.workspace.ports.artifacts, self.whole.layers
        if not self.params.keep_matrices or any(facts.ordinal not in self._kept | self._entries for facts in layers):
            return
        if len(self._kept) == len(layers):
            collection = replace(self.whole.collection, ekfac=False)
            write_index(
                artifacts, replace(self.whole, collection=collection), self._kept, f"{FOLDER}/factors.index.json"
            )
        else:
            artifacts.save_json(
                INDEX,
                {
                    "format": FORMAT,
                    "kappa_max": self._kappa_max,
                    "layers": [self._entries[facts.ordinal] for facts in layers],
                },
            )
