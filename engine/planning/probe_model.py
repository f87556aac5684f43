"""The model's probe: a dry run of very few examples before anything large is allocated.

Which layers are called and how often, which are fed by the same tensor, which cannot tell their
examples apart, what is used where no hook sees it, and what autograd saves of a pass.
"""

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from engine.accumulation.hooked_model import find_shared_parameters
from engine.accumulation.loss_head import head_of
from engine.collection.nan_check import locate_nan
from engine.collection.pass_job import PassJob
from engine.collection.probe import AT_A_NORMALISATION, Probe, ProbedModel, TimedForward
from engine.errors import EngineError, ModelRefused
from engine.factors.representation import WorkloadEstimate, choose
from engine.layers.coverage import Survey, declare
from engine.layers.elementwise import BareLayer
from engine.layers.layer import BlockLayer, TreatedLayer
from engine.memory.out_of_memory import free_memory, ran_out_of_memory
from engine.model.activation_memory import GradientCopies, Saved, trace_saved_bytes
from engine.model.batches import Batch, tensors
from engine.model.dtype_casts import casts_of, settle_casts
from engine.model.meta_device import attention_workspace
from engine.model.outputs import call_model, predict
from engine.model.pass_peak import peak_lines
from engine.model.state.generators import seed_generators
from engine.model.state.own_gradients import takes_own_gradients
from engine.planning.choose_plan import head_choice
from engine.planning.collection.reductions import with_shards
from engine.planning.dry_pass import (
    DRY_EXAMPLES,
    different_sample,
    pass_events,
    repeated,
    require_undecided,
    samples_of,
    watch_operations,
)
from engine.row_layout.attention_masks import Masking, Run, try_masks
from engine.row_layout.layer_calls import (
    Call,
    InputOverwritten,
    find_followers,
    find_overwritten,
    find_routed,
    find_shared_tables,
    find_unattributed,
    record_calls,
)
from engine.row_layout.length_buckets import is_padding_irrelevant
from engine.row_layout.row_order import find_row_orders
from engine.row_layout.unbatched_inputs import find_spreadable_tables
from engine.tracing.function_mode import ParameterUseMode
from engine.tracing.functional_layers import Uses, add_functional_layers, calls_of, find_candidates, operations_of
from engine.tracing.parameter_uses import assumed_products


def probe_model(job: PassJob, survey: Survey) -> ProbedModel:
    """Run the model on its first example, repeated, and find its row layout and the calls of every layer.

    The job, as far as the document says it, comes back with its tables, masks and row orders.
    """
    batch = job.moved(job.probed_batch())
    with locate_nan(job.model, job.task) as current:
        current.begin(batch, 0)
        times = 1 if job.collection.batch_size == 1 else DRY_EXAMPLES[0]
        labelled = job.task.likelihood == "model"
        settle_casts(job.model, partial(call_model, job.model, repeated(batch, times), labelled=labelled))
        job = job.with_class_axis(batch)
        # the analyses that pass over the data later read it alike
        job.workspace.inputs.task = job.task
        if job.collection.batch_size == 1:
            # every position is the only example's
            return _probe_as_it_is(job, survey, batch)
        try:
            return _probe_copies(job, survey, batch)
        except EngineError:
            # what a model makes of copies of one example says nothing of its data; its first batch does
            return _probe_as_it_is(job, survey, batch)


def _probe_copies(job: PassJob, survey: Survey, batch: Batch) -> ProbedModel:
    """Probe with two sizes of batches of one example, repeated."""
    fewer, more = (repeated(batch, times) for times in DRY_EXAMPLES)
    few, many = _seen(job, survey, fewer), _seen(job, survey, more)
    tables = find_shared_tables(few.calls, many.calls)
    shapes_alone = batch.index.is_meta
    if tables:
        # only numbers can prove it
        spread = (
            frozenset(tables)
            if shapes_alone
            else find_spreadable_tables(tables, partial(_disturbed, job, survey, fewer))
        )
        job = job.laid_out(tables=spread)
        few, many = _seen(job, survey, fewer), _seen(job, survey, more)
    job = job.laid_out(masking=_masking(job, survey, batch))
    if shapes_alone:
        few = dataclasses.replace(few, mixed=find_unattributed(few.calls, many.calls, DRY_EXAMPLES))
        return ProbedModel(job=job, survey=survey, probe=few)
    orders = find_row_orders(batch, few.calls, few.examples, _run(job, survey))
    job = job.laid_out(orders=orders)
    with torch.no_grad():
        cut = is_padding_irrelevant(
            batch, job.task, few.calls, few.examples, job.layout.masking, partial(predict, job.model, task=job.task)
        )
    job = dataclasses.replace(job.laid_out(overwritten=find_overwritten(few.calls)), cut_padding=cut)
    # where rows have an order of their own, the operations may show it
    mixed = find_unattributed(few.calls, many.calls, DRY_EXAMPLES) | orders.unordered_among(survey.treated)
    mixed |= _routed(job, survey, few, batch)
    return ProbedModel(job=job, survey=survey, probe=dataclasses.replace(few, mixed=mixed))


def _routed(job: PassJob, survey: Survey, few: Probe, batch: Batch) -> frozenset[str]:
    """Return the names of layers that are given the rows of some examples alone, as different examples show."""
    if batch.size == 1:
        return frozenset()
    try:
        seen = _seen(job, survey, different_sample(batch))
    except Exception as error:
        if not (isinstance(error, EngineError) or ran_out_of_memory(error)):
            raise
        seen = None
    if seen is None:
        # outside of the except block, whose traceback holds the tensors; the passes take smaller slices
        free_memory(job.workspace.machine.device)
        return frozenset()
    return find_routed(few.calls, seen.calls, (few.examples, seen.examples))


def _probe_as_it_is(job: PassJob, survey: Survey, batch: Batch) -> ProbedModel:
    """Probe with the first batch itself, which shows less: two sizes of it are not held against each other."""
    one = dataclasses.replace(_seen(job, survey, batch), whole=job.collection.batch_size > 1)
    job = job.laid_out(masking=_masking(job, survey, batch), overwritten=find_overwritten(one.calls))
    mixed = _without_example(one)
    return ProbedModel(job=job, survey=survey, probe=dataclasses.replace(one, mixed=mixed))


def _without_example(one: Probe) -> frozenset[str]:
    """Return the names of layers of which some call shows no dimension for the examples.

    Their positions are those of no example by themselves (a table of distances): the operations may show it.
    """
    return frozenset(call.layer.name for call in one.calls if not call.layer.batch_first(call.entered, one.examples))


def exclude_other_uses(probed: ProbedModel) -> ProbedModel:
    """Exclude layers whose parameters the model also reads where no hook sees it.

    They are listed with their reason and may be found again among the model's operations.
    """
    job, survey, seen = probed.job, probed.survey, probed.probe
    called = {call.layer.name for call in seen.calls}
    (batch,) = samples_of(job, seen)[:1]

    def run() -> Tensor:
        seed_generators(job.collection.seed)
        return predict(job.model, batch, job.task).outputs

    def other_uses(layers: Sequence[TreatedLayer]) -> frozenset[str] | None:
        try:
            return find_shared_parameters(layers, survey.aliases, run, casts_of(job.model))
        except (EngineError, RuntimeError) as error:
            require_undecided(error, job.model)
            return None

    layers, barred = [layer for layer in survey.treated if layer.name in called], frozenset[str]()
    elsewhere = other_uses(layers)
    if elsewhere is None:
        # with those in place, forward takes gradients with respect to what stands for the parameters
        barred = frozenset(layer.name for layer in layers if other_uses([layer]) is None)
        elsewhere = barred | (other_uses([layer for layer in layers if layer.name not in barred]) or frozenset())
    if not elsewhere:
        return probed
    refused = tuple(
        # the operations may still show what all their uses are
        dataclasses.replace(declare(layer, "used_elsewhere"), open=layer.name not in barred)
        for layer in survey.treated
        if layer.name in elsewhere
    )
    kept = tuple(layer for layer in survey.treated if layer.name not in elsewhere)
    calls = [call for call in seen.calls if call.layer.name not in elsewhere]
    return dataclasses.replace(
        probed,
        survey=dataclasses.replace(survey, treated=kept, declared=(*survey.declared, *refused)),
        probe=dataclasses.replace(seen, layers=kept, calls=calls),
    )


def probe_functional_layers(
    probed: ProbedModel, forced: frozenset[str] = frozenset(), unplaced: frozenset[str] = frozenset()
) -> ProbedModel:
    """Look into the operations where modules alone do not show what the parameters do.

    ``forced`` names layers whose calls do not show it, whatever their class says, ``unplaced`` those whose rows the
    shapes of the first batch do not tell apart by example. The layers that the operations show are added, and what
    passes follow of their parameters.
    """
    job, survey, seen, mixed = probed.job, probed.survey, probed.probe, probed.probe.mixed | unplaced
    parameters = find_candidates(job.model, survey, {call.layer for call in seen.calls}, mixed, forced)
    if not parameters:
        return probed
    samples = samples_of(job, seen)
    try:
        runs = [watch_operations(job, survey, sample, parameters) for sample in samples]
    except (EngineError, RuntimeError) as error:
        require_undecided(error, job.model)
        # what is measured is what modules show, and the gradient identity decides
        return probed
    uses = [found for found, _ in runs]
    if mixed and len(runs) > 1:
        with contextlib.suppress(EngineError):
            sample = different_sample(job.moved(job.probed_batch()))
            uses.append(watch_operations(job, survey, sample, parameters)[0])
            products = [each for use in uses for each in use.products]
            uses[-1].products += assumed_products(survey.treated, products, parameters, unplaced)
    survey = add_functional_layers(job.model, survey, parameters, tuple(uses), mixed, forced)
    treated = {role for layer in survey.treated for role in (layer, *layer.roles)}
    calls = [[call for call in found if call.layer in treated] + calls_of(uses, survey) for uses, found in runs]
    if len(calls) == 1:
        # of a whole batch the calls of operations have said whose their rows are
        mixed = _without_example(dataclasses.replace(seen, calls=calls[0])) if seen.whole else frozenset()
    else:
        mixed = find_unattributed(calls[0], calls[1], DRY_EXAMPLES)
    seen = dataclasses.replace(seen, layers=survey.treated, calls=calls[0], examples=samples[0].size, mixed=mixed)
    # a part of a parameter that is not covered is not an unforeseen use of its other parts
    job = job.laid_out(operations=operations_of(survey, parameters))
    return ProbedModel(job=job, survey=survey, probe=seen)


def probe_sizes(probed: ProbedModel) -> ProbedModel:
    """Find the sizes of passes: shared activations, what autograd saves, and the representation of each layer's G."""
    job, survey = probed.job, probed.survey
    probe = dataclasses.replace(probed.probe, shared=find_followers(probed.probe.calls, survey.treated))
    return probed.with_probe(_represented(job, survey, _with_activations(job, survey, probe)))


def _with_activations(job: PassJob, survey: Survey, seen: Probe) -> Probe:
    """Return the probe with what autograd saves of a pass, where anything is pulled back."""
    if job.collection.fisher == "forward_only":
        return seen
    batch = job.moved(job.probed_batch())
    roles = [role for layer in survey.treated for role in layer.roles]
    watched = {role.module: job.collection.exact_trace or isinstance(role, BlockLayer) for role in roles}
    copies = GradientCopies(
        outputs={role.module: AT_A_NORMALISATION for role in roles if isinstance(role, BlockLayer)},
        # whether any position is padding, the first batch cannot say for the others
        padded=batch.mask is not None,
    )

    # a recurrent kernel saves other things than the steps that stand in its place
    kernels = [layer for layer in survey.treated if isinstance(layer.module, (nn.RNNBase, nn.RNNCellBase))]
    stepped = {name: tensor for layer in kernels for name, tensor in layer.watched.items()}

    def run(examples: int) -> Tensor:
        part = samples[sizes.index(examples)]
        seen_by = ParameterUseMode(stepped, Uses(examples=examples)) if stepped else None
        if seen_by is not None:
            seen_by.begin(tensors(part.inputs), examples)
        with job.precision.autocast(job.workspace.machine.device), seen_by or contextlib.nullcontext():
            begun = time.perf_counter()
            outputs = predict(job.model, part, job.task).outputs
            # watched, operations take twice as long
            durations.append((time.perf_counter() - begun) / (2 if stepped else 1))
        if job.numerics.device == "cuda":
            attention.append(attention_workspace(outputs, examples, job.numerics.multiprocessors))
        return outputs

    durations: list[float] = []
    attention: list[Saved | None] = []
    samples = samples_of(job, seen)
    sizes = tuple(sample.size for sample in samples)
    # a direction that overflows is pulled back again, through the same graph; and so is another direction
    repeated = job.precision.amp == "fp16"
    retained = repeated or job.collection.fisher == "type2" or job.collection.samples > 1
    try:
        saved, recomputed, met, normalised = trace_saved_bytes(
            run, sizes, job.model, watched, copies, retained=retained
        )
    except (EngineError, RuntimeError) as error:
        require_undecided(error, job.model)
        return seen
    if saved.of(1) == 0:
        # no graph at all: what the collection follows are loose parameters, which no module's call shows
        return seen
    # steps, a graph that is kept and gradients of parameters are no single module's; what bare parameters hold has a
    # term of its own
    if (
        stepped
        or takes_own_gradients(job.model)
        or (retained and not any(isinstance(layer, BareLayer) for layer in survey.treated))
    ):
        # where a pass refuses the sample, the one that counts says why, or is made anew
        with contextlib.suppress(EngineError, InputOverwritten):
            held = [pass_events(job, survey.treated, seen.mixed, each, directions=1 + retained) for each in samples]
            met = dataclasses.replace(met, others=peak_lines(sizes, held))
    return dataclasses.replace(
        seen,
        saved=saved,
        recomputed=recomputed,
        met=met,
        met_normalised=normalised,
        attention=next(iter(attention), None),
        repeated=repeated,
        forward=None if seen.whole else TimedForward(sizes[-1], durations[-1]),
    )


def _represented(job: PassJob, survey: Survey, seen: Probe) -> Probe:
    """The probe, with how each layer is to keep its G."""
    workspace = job.workspace
    foreseen = WorkloadEstimate(
        calls=seen.calls,
        seen=seen.examples,
        outputs=seen.outputs,
        examples=workspace.inputs.foreseen_examples(workspace.machine.ranks),
    )
    basis = workspace.options.decomposition == "vectors"
    chosen = {
        layer.name: dataclasses.replace(
            choose(layer, workspace.options.woodbury, job.collection, foreseen, job.dtype), basis=basis
        )
        for layer in survey.treated
    }
    represented = dataclasses.replace(seen, representations=chosen | head_choice(job, survey, seen))
    shared = with_shards(workspace.machine.ranks, represented, job.collection.reduction)
    return dataclasses.replace(represented, representations=shared)


def _disturbed(job: PassJob, survey: Survey, batch: Batch, tables: frozenset[str], disturb: str | None) -> Tensor:
    """Outputs of ``batch`` with ``tables`` spread over it, the last copy of one of them disturbed."""
    seed_generators(job.collection.seed)
    # without its labels: the outputs of one example must be distinct from another's
    unlabelled = dataclasses.replace(job.task, loss=None)
    with torch.no_grad(), record_calls(survey.treated, batch.size, tables, disturb):
        return predict(job.model, batch, unlabelled).outputs


def _masking(job: PassJob, survey: Survey, batch: Batch) -> Masking:
    """The calls that have the positions of the mask of ``batch``."""
    if batch.index.is_meta:
        # only numbers can prove it
        return Masking()
    return try_masks(batch, _run(job, survey), gradients=job.collection.fisher != "forward_only")


def _run(job: PassJob, survey: Survey) -> Run:
    """Return a run of the model on a few examples, whose outputs are not arranged."""

    def run(trial: Batch) -> tuple[list[Call], list[Tensor]]:
        # a model that draws numbers draws the same ones
        seed_generators(job.collection.seed)
        with torch.no_grad(), record_calls(survey.treated, trial.size, job.layout.tables) as calls:
            returned = call_model(job.model, trial, labelled=job.task.likelihood == "model")
        return calls, tensors(returned)

    return run


def _seen(job: PassJob, survey: Survey, batch: Batch) -> Probe:
    # what a model that draws shows must not hang on the caller's generators
    seed_generators(job.collection.seed)
    try:
        with torch.no_grad(), record_calls(survey.treated, batch.size, job.layout.tables) as calls:
            prediction = predict(job.model, batch, job.task)
    except ModelRefused:
        # a forward pass may take gradients itself
        with torch.enable_grad(), record_calls(survey.treated, batch.size, job.layout.tables) as calls:
            prediction = predict(job.model, batch, job.task)
    head = head_of(calls, prediction.logits)
    return Probe(
        layers=survey.treated,
        dtype=job.dtype,
        calls=calls,
        examples=batch.size,
        outputs=prediction.outputs.numel(),
        classes=prediction.outputs.shape[-1],
        head=head,
    )
