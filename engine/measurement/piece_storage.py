"""Piece storage: a piece of a divided job collects the factors of its examples and stores them, and measures nothing.

What the whole job measures is that of all examples together; the pieces' sums are merged first, and each layer is
decomposed once.
"""

from collections.abc import Collection
from dataclasses import replace
from functools import partial

from engine.collect import collect_or_read, prepare_collection
from engine.collection.checkpoints import fingerprint
from engine.collection.ekfac_passes import correct_part, eigenvectors
from engine.errors import NotMergeable
from engine.factors.factor_set import FactorSet
from engine.measurement.decompose_layer import store_decompositions
from engine.merging.corrections import CorrectionFiles, join_bases, read_bases, write_bases
from engine.merging.part_files import write_part
from engine.model.activation_memory import set_activation_checkpointing
from engine.planning.model_memory import weigh_model
from engine.workspace import Workspace


def store_piece(workspace: Workspace) -> FactorSet:
    """Collect the factors of a part of the data, ``inputs.part``, and store them with all that a merge takes.

    ``ValueError`` if the job is over the whole data; ``EngineError`` as ``engine.errors`` lists.
    """
    if workspace.inputs.part is None:
        raise ValueError("a piece needs `inputs.part`: which examples it is over, and of which data")
    collected = collect_or_read(workspace)
    with workspace.machine.operation("piece", "collection"):
        write_part(workspace.ports.artifacts, collected)
    return collected


def store_layers(workspace: Workspace, names: Collection[str]) -> None:
    """Decompose some layers of the merged factors of all pieces, and store what the job would compute of them.

    ``inputs.stored_pieces`` has the pieces; what is stored goes to the job's artifacts. Layers that share an A come
    together. ``EngineError`` as ``engine.errors`` lists.
    """
    whole = collect_or_read(workspace)
    layers = [facts for facts in whole.layers if facts.name in names]
    missing = sorted(set(names) - {facts.name for facts in layers})
    if missing:
        raise NotMergeable(
            f"layer `{missing[0]}` is to be decomposed, and the merged factors have no such layer", layer=missing[0]
        )
    if workspace.options.decomposition != "none":
        store_decompositions(workspace, whole, layers)
    if whole.collection.ekfac:
        with workspace.machine.operation("bases", "decomposition"):
            write_bases(
                workspace.ports.artifacts,
                replace(whole, layers=tuple(layers)),
                partial(eigenvectors, workspace),
            )


def store_bases(workspace: Workspace) -> None:
    """Merge the factors of all pieces, and store the eigenbases in which the pieces re-estimate eigenvalues.

    Those that ``inputs.stored_decompositions`` hold are taken from there.
    """
    with workspace.machine.operation("bases", "decomposition"):
        whole = collect_or_read(workspace)
        if workspace.inputs.stored_decompositions:
            join_bases(workspace.ports.artifacts, whole, workspace.inputs.stored_decompositions)
        else:
            write_bases(workspace.ports.artifacts, whole, partial(eigenvectors, workspace))


def store_correction(workspace: Workspace) -> None:
    """Re-estimate eigenvalues over the examples of a part, in the bases of the merged factors, and store them.

    ``ValueError`` without ``inputs.part`` or ``inputs.bases``; ``EngineError`` as ``engine.errors`` lists. The model is
    restored whatever happens.
    """
    part, stored = workspace.inputs.part, workspace.inputs.bases
    if part is None or stored is None:
        raise ValueError("a correction of a part needs `inputs.part` and `inputs.bases`")
    weigh_model(workspace)
    bases = read_bases(stored)
    with prepare_collection(workspace) as (planned, _):
        probed = planned.probed.for_passes(planned.plan.chosen, None)
        bases.require_model(fingerprint(probed.job.model))
        writing = CorrectionFiles(artifacts=workspace.ports.artifacts, bases=bases)
        with (
            set_activation_checkpointing(probed.job.model, wanted=planned.plan.chosen.activation_checkpointing),
            workspace.machine.operation("correction", "correction"),
        ):
            corrections = planned.plan.chosen.corrections
            runs = correct_part(probed.job, probed.survey.treated, corrections, bases, writing.write)
    writing.close(runs, begin=part.begin)
