"""Pass statistics: the sums of one pass's layers, zeroed, or as a checkpoint holds them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from engine.accumulation.batch_variance import BatchVariance, activation_refusal, gradient_refusal
from engine.accumulation.layer_statistics import LayerStatistics
from engine.accumulation.tied_statistics import TiedHeadStatistics
from engine.collection.checkpoints import CheckpointForeign, Checkpoints, Resumed
from engine.collection.collection_state import CollectionState
from engine.collection.normalise import foreseen_flaw
from engine.collection.probe import ProbedModel
from engine.collection.ranks.agreement import agree_on_sums
from engine.factors.representation import DENSE
from engine.layers.layer import TreatedLayer, factor_sides
from engine.layers.tied import TiedHeadLayer
from engine.memory.host_accumulation import ROW_STAGING_NUMBERS, Staging, staging_numbers
from engine.memory.out_of_memory import first_line, ran_out_of_memory
from engine.model.batches import Batch


def begin_statistics(
    probed: ProbedModel,
    layers: Sequence[TreatedLayer],
    state: CollectionState,
    stream: Iterator[Batch],
    checkpoints: Checkpoints,
    found: Resumed | None,
) -> tuple[LayerStatistics, ...]:
    """Return the sums of the layers of a pass: zeroed, or those of a checkpoint that has proved right on every rank."""
    if found is None:
        state.begin_pass()
        return tuple(_allocated(probed, layers, state.shared).values())
    ranks, by_name = probed.job.workspace.machine.ranks, dict[str, LayerStatistics]()
    foreign = full = ""
    try:
        by_name = _allocated(probed, layers, state.shared)
        checkpoints.restore(found, by_name, stream)
    except CheckpointForeign as error:
        foreign = str(error)
    except Exception as error:
        if ranks.size == 1 or not ran_out_of_memory(error):
            raise
        full = first_line(error)
    foreign, full = agree_on_sums(ranks, foreign, full)
    if foreign:
        raise CheckpointForeign(foreign)
    if full:
        raise MemoryError(full)
    checkpoints.take_over(found)
    state.take_over(found.stored)
    if not found.running:
        state.begin_pass()
    return tuple(by_name.values())


def _allocated(
    probed: ProbedModel, treated: Sequence[TreatedLayer], shared: dict[str, str]
) -> dict[str, LayerStatistics]:
    """Zeroed sums of every layer of a pass."""
    job, ranks = probed.job, probed.job.workspace.machine.ranks
    by_name: dict[str, LayerStatistics] = {}
    traced = job.collection.exact_trace and job.collection.fisher != "forward_only"
    staging = row_staging = None
    if job.offload:
        sides = [side for layer in treated for side in factor_sides(layer, follows=layer.name in shared)]
        staging = Staging(staging_numbers(sides), job.dtype, job.workspace.machine.device)
    elif job.workspace.machine.device.type == "cuda" and any(each.on_host for each in job.representations.values()):
        row_staging = Staging(ROW_STAGING_NUMBERS, job.dtype, job.workspace.machine.device)
    unordered = job.layout.orders.unordered_among(treated)
    for layer in treated:
        sharing = job.collection.sharing if layer.form == "kronecker" else "expand"
        # a leader stands before its followers
        leader = by_name[shared[layer.name]] if layer.name in shared else None
        representation = job.representations.get(layer.name, DENSE)
        statistics = statistics_kind(layer)(
            layer=layer,
            sharing=sharing,
            leader=leader,
            traced=traced and layer.name not in unordered,
            ordered=layer.name not in unordered,
            staging=staging,
            row_staging=row_staging if representation.on_host else None,
            representation=representation,
            precision=job.precision,
        )
        needs_order = statistics.needs_order or job.collection.ekfac
        statistics.flaw = foreseen_flaw(layer, job.collection, probed.probe.mixed)
        if layer.name in unordered and needs_order and statistics.flaw is None:
            statistics.flaw = "batch_not_first"
        statistics.partial = job.workspace.inputs.part is not None
        # room for this rank's rows; more is made where its part is larger
        statistics.representation = replace(representation, rows=-(-representation.rows // ranks.size))
        statistics.allocate(job.dtype, job.workspace.machine.device)
        statistics.representation = representation
        if job.collection.batch_variance:
            _begin_variance_(statistics, job.collection.fisher)
        by_name[layer.name] = statistics
    return by_name


def _begin_variance_(statistics: LayerStatistics, fisher: str) -> None:
    """Begin the variance over batches of the sums that a layer holds itself.

    Memory:
        A second set of those sums.
    """
    layer, kept = statistics.layer, statistics.representation.kind
    if statistics.A is not None and activation_refusal(layer) is None:
        statistics.variance_A = BatchVariance.of(statistics.A)
    if statistics.G is not None and gradient_refusal(layer, kept, fisher) is None:
        statistics.variance_G = BatchVariance.of(statistics.G)


def statistics_kind(layer: TreatedLayer) -> type[LayerStatistics]:
    """Choose the class that holds a layer's sums."""
    return TiedHeadStatistics if isinstance(layer, TiedHeadLayer) else LayerStatistics
