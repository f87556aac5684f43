"""Modules that are unusual objects: each is measured, by autograd's figure, or refused in a sentence with its remedy.

The figure is the trace of the empirical Fisher's block of each covered layer: the mean over examples of the squared
norm of the gradient of that example's loss, by ``torch.autograd.grad`` on the module itself, which is left as it was.
"""

import copy
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from catalog.analyses.analysis import LayerResult
from engine.errors import EngineError
from kronoscope.local import measure

torch.manual_seed(1)
INPUTS, TARGETS = torch.randn(12, 6), torch.arange(12) % 5
WHOLE = "measured whole"
CASES: dict[str, tuple[Callable[[], Any], str]] = {}
"""Each builds a module, and says how it ends: measured whole, the reason of a part, or a pattern of the refusal."""


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


class Around(nn.Module):
    """A module around a plain one, whose forward pass is the function given."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Any], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.m, self.run = plain() if inner is None else inner, run

    def forward(self, x: Tensor) -> Any:
        return self.run(self.m, x)


def case(ends: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(build: Callable[[], Any]) -> Callable[[], Any]:
        CASES[build.__name__] = build, ends
        return build

    return add


def around(name: str, ends: str, run: Callable[[Any, Tensor], Any]) -> None:
    CASES[name] = (lambda: Around(run)), ends


@case("program of torch.export.*measure the torch.nn.Module that was exported")
def exported() -> nn.Module:
    return torch.export.export(plain(), (INPUTS[:2],)).module()


@case("program of torch.export")
def exported_with_any_batch() -> nn.Module:
    return torch.export.export(plain(), (INPUTS[:2],), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()


@case("program of torch.export")
def exported_part() -> nn.Module:
    return nn.Sequential(torch.export.export(plain(), (INPUTS,)).module(), nn.Linear(5, 5))


@case("`model` is ExportedProgram; give a torch.nn.Module, the one that was exported")
def exported_program() -> Any:
    return torch.export.export(plain(), (INPUTS[:2],))


@case("program of TorchScript .*measure the torch.nn.Module that it was made of")
def scripted() -> Any:
    return torch.jit.script(plain())


@case("program of TorchScript")
def traced() -> Any:
    return torch.jit.trace(plain(), (INPUTS[:2],))


@case("program of TorchScript")
def scripted_and_frozen() -> Any:
    return torch.jit.freeze(torch.jit.script(plain().eval()))


@case("unsupported_layer")
def scripted_part() -> nn.Module:
    model = plain()
    model[0] = torch.jit.script(model[0])
    return model


@case("`0` is a program of TorchScript")
def scripted_and_frozen_part() -> nn.Module:
    model = plain()
    model[0] = torch.jit.freeze(torch.jit.script(model[0].eval()))
    return model


@case(WHOLE)
def compiled() -> Any:
    return torch.compile(plain(), backend="eager")


@case(WHOLE)
def compiled_in_place() -> nn.Module:
    model = plain()
    model.compile(backend="eager")
    return model


@case(WHOLE)
def compiled_part() -> nn.Module:
    model = plain()
    model[0] = torch.compile(model[0], backend="eager")  # type: ignore[assignment]
    return model


@case(WHOLE)
def symbolically_traced() -> nn.Module:
    return torch.fx.symbolic_trace(plain())


@case(r"`0.weight` stands on the meta device.*`model.to_empty")
def on_meta() -> nn.Module:
    return plain().to("meta")


@case(r"`2.bias` stands on the meta device")
def partly_on_meta() -> nn.Module:
    model = plain()
    model[2].bias = nn.Parameter(torch.empty(5, device="meta"))
    return model


@case("`0.weight` was made under `torch.inference_mode.*build or load the model outside")
def made_in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return plain()


@case("`b` was made under `torch.inference_mode")
def buffer_made_in_inference_mode() -> nn.Module:
    model = plain()
    with torch.inference_mode():
        model.register_buffer("b", torch.ones(6))
    return model


@case("`0.weight` has a storage that was freed.*load the weights")
def without_storage() -> nn.Module:
    model = plain()
    model[0].weight.untyped_storage().resize_(0)
    return model


@case("`0.weight` has no shape yet; call the model once")
def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(5))


@case("`u` has no shape yet")
def lazy_buffer() -> nn.Module:
    model = plain()
    model.register_buffer("u", nn.parameter.UninitializedBuffer())
    return model


@case("no trainable parameter; give one with weights that are trained")
def quantised() -> Any:
    return torch.ao.quantization.quantize_dynamic(plain().eval(), {nn.Linear}, dtype=torch.qint8)


@case("converted to float64, as `collection.dtype` says.*take `collection.dtype: float32`")
def partly_quantised() -> nn.Module:
    return nn.Sequential(quantised()[0], nn.Tanh(), plain()[2])


@case("no trainable parameter; give one with weights that are trained")
def without_trained_weights() -> nn.Module:
    return plain().requires_grad_(requires_grad=False)


@case("no trainable parameter")
def without_parameters() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Tanh())


class Bent(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5 + weight.tanh()


@case(WHOLE)
def parametrised() -> nn.Module:
    model = plain()
    parametrize.register_parametrization(model[0], "weight", Bent())
    return model


@case(WHOLE)
def weight_normed_by_hook() -> nn.Module:
    model = plain()
    nn.utils.weight_norm(model[0])
    return model


@case(WHOLE)
def weight_normed() -> nn.Module:
    model = plain()
    parametrizations.weight_norm(model[0])
    return model


@case(WHOLE)
def spectral_normed_by_hook() -> nn.Module:
    model = plain()
    nn.utils.spectral_norm(model[0])
    return model


@case(WHOLE)
def spectral_normed() -> nn.Module:
    model = plain()
    parametrizations.spectral_norm(model[0])
    return model


@case(WHOLE)
def orthogonal() -> nn.Module:
    model = plain()
    parametrizations.orthogonal(model[0])
    return model


@case(WHOLE)
def pruned() -> nn.Module:
    model = plain()
    prune.l1_unstructured(model[0], "weight", 0.5)
    return model


class Sparse(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.h = nn.Parameter(weight), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        return self.h(torch.sparse.mm(self.w, x.T).T.tanh())


@case("unknown_operation")
def sparse() -> nn.Module:
    return Sparse(torch.randn(8, 6).relu().to_sparse())


@case("converted to float64, as `collection.dtype` says.*take `collection.dtype: float32`")
def sparse_by_rows() -> nn.Module:
    return Sparse(torch.randn(8, 6).relu().to_sparse_csr())


@case(WHOLE)
def embedding_with_sparse_gradients() -> nn.Module:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Embedding(10, 6, sparse=True), nn.Linear(6, 5))
    return Around(lambda m, x: m((x[:, 0] * 3).long().clamp(0, 9)), inner)


@case(WHOLE)
def shared_across_modules() -> nn.Module:
    inner = plain()
    inner.append(nn.Linear(6, 8))
    inner[3].weight = inner[0].weight
    return Around(lambda m, x: m[2](m[0](x).tanh()) + m[2](m[3](x).tanh()), inner)


@case(WHOLE)
def with_forward_hooks() -> nn.Module:
    model = plain()
    model[0].register_forward_hook(lambda module, given, output: output * 2)
    model[2].register_forward_pre_hook(lambda module, given: (given[0] + 1,))
    return model


@case(WHOLE)
def with_backward_hooks() -> nn.Module:
    model = plain()
    model[0].register_full_backward_hook(lambda module, inner, outer: None)
    model[2].register_full_backward_pre_hook(lambda module, outer: None)
    return model


@case(WHOLE)
def with_a_hook_that_changes_gradients() -> nn.Module:
    model = plain()
    model[2].register_full_backward_hook(lambda module, inner, outer: (inner[0] * 2,))
    return model


@case("gradient_identity")
def with_a_hook_on_a_parameter() -> nn.Module:
    model = plain()
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    return model


@case(WHOLE)
def data_parallel() -> nn.Module:
    return nn.DataParallel(plain())


@case(WHOLE)
def averaged() -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(plain())


@case(WHOLE)
def in_half_precision() -> nn.Module:
    return plain().half()


@case(WHOLE)
def in_bfloat16() -> nn.Module:
    return plain().bfloat16()


@case(WHOLE)
def partly_in_half_precision() -> nn.Module:
    inner = plain()
    inner[0].half()
    return Around(lambda m, x: m[2](m[0](x.half()).float().tanh()), inner)


@case(WHOLE)
def with_weights_of_one_byte_that_are_widened() -> nn.Module:
    inner = plain()
    inner[0].weight = nn.Parameter(inner[0].weight.data.to(torch.float8_e4m3fn), requires_grad=False)
    return Around(lambda m, x: m[2](functional.linear(x, m[0].weight.to(x.dtype), m[0].bias).tanh()), inner)


@case(WHOLE)
def with_whole_numbers_as_weights() -> nn.Module:
    inner = plain()
    inner[0].weight = nn.Parameter(torch.randint(-2, 2, (8, 6)), requires_grad=False)
    return Around(lambda m, x: m[2](functional.linear(x, m[0].weight.to(x.dtype), m[0].bias).tanh()), inner)


class Named(Tensor):
    """A tensor of another class, and nothing else."""


@case(WHOLE)
def with_a_subclass() -> nn.Module:
    model = plain()
    model[0].weight = nn.Parameter(model[0].weight.data.as_subclass(Named))
    return model


@case(WHOLE)
def with_a_view_of_one_vector() -> nn.Module:
    model, flat = plain(), torch.randn(56)
    model[0].weight, model[0].bias = nn.Parameter(flat[:48].view(8, 6)), nn.Parameter(flat[48:])
    return model


@case(WHOLE)
def with_an_expanded_weight() -> nn.Module:
    model = plain()
    model[0].weight = nn.Parameter(torch.randn(1, 6).expand(8, 6))
    return model


@case('missing the required "forward" function')
def without_forward() -> nn.Module:
    return nn.ModuleList([nn.ModuleList([nn.Linear(6, 5)])])


@case(WHOLE)
def of_lists_in_lists() -> nn.Module:
    inner = nn.ModuleList([nn.ModuleList([nn.Linear(6, 8)]), nn.ModuleDict({"h": nn.Linear(8, 5)})])
    return Around(lambda m, x: m[1]["h"](m[0][0](x).tanh()), inner)


around("called_by_functional_call", WHOLE, lambda m, x: torch.func.functional_call(m, dict(m.named_parameters()), (x,)))
around("called_in_vmap", "could be measured: transformed.*outside of `torch.func.vmap`.*on a whole batch",
       lambda m, x: torch.vmap(m)(x))  # fmt: skip
around("checkpointed", WHOLE, lambda m, x: checkpoint(m, x, use_reentrant=False))
around("that_returns_a_mapping", WHOLE, lambda m, x: {"logits": m(x), "loss": None})
around("that_returns_a_list", WHOLE, lambda m, x: [m(x)])
around("that_returns_nothing", "returned `NoneType` without a tensor; the task needs", lambda m, x: None)
around("that_returns_a_text", "returned `str` without a tensor", lambda m, x: "logits")
around("that_returns_an_array", "returned `ndarray` without a tensor", lambda m, x: m(x).detach().numpy())
around("that_is_a_generator", "returned `generator` without a tensor", lambda m, x: (m(each) for each in [x]))
around("that_returns_classes", r"outputs of shape \(\d+,\) for \d+ examples; classification needs",
       lambda m, x: m(x).argmax(1))  # fmt: skip
DETACHED = (
    "could be measured: no_gradient.*look for a `forward` that detaches its outputs, or runs under `torch.no_grad`"
)
around("that_detaches", DETACHED, lambda m, x: m(x).detach())
around("that_runs_without_gradients", DETACHED, torch.no_grad()(lambda m, x: m(x)))
around("that_runs_in_inference_mode", DETACHED, torch.inference_mode()(lambda m, x: m(x)))


class OwnCall(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)


@case(WHOLE)
def with_a_call_of_its_own() -> nn.Module:
    model = plain()
    model[0] = OwnCall(6, 8)
    return model


class WholeCall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.m = plain()

    def __call__(self, x: Tensor) -> Any:
        return self.m(x)


CASES["that_is_called_and_has_no_forward"] = WholeCall, WHOLE
CASES["that_is_a_copy"] = (lambda: copy.deepcopy(plain())), WHOLE
CASES["that_was_pickled"] = (lambda: pickle.loads(pickle.dumps(plain()))), WHOLE


def test_there_are_enough() -> None:
    assert len(CASES) >= 50


def told(model: Any, dtype: str = "float64", **more: Any) -> list[LayerResult]:
    found = measure(
        model,
        (INPUTS, TARGETS),
        task="classification",
        kinds=("factors",),
        collection={"fisher": "empirical", "dtype": dtype} | more,
    )
    return list(found.layers)


def traces(model: nn.Module, rows: list[LayerResult]) -> Iterator[tuple[float, float, str]]:
    """The measured trace of each covered layer's block, autograd's, and the layer's name."""
    model.eval()
    named = dict(model.named_parameters())
    wanted = {name: named[name] for row in rows if row.status == "covered" for name in row.parameters}
    squares = dict.fromkeys(wanted, 0.0)
    dtype = next(parameter.dtype for parameter in wanted.values())
    # a part that is wider than the first converts by itself
    dtype = dtype if len({parameter.dtype for parameter in wanted.values()}) == 1 else torch.float32
    for x, y in zip(INPUTS, TARGETS, strict=True):
        outputs = model(x[None].to(dtype))
        outputs = outputs["logits"] if isinstance(outputs, dict) else outputs[0] if type(outputs) is list else outputs
        loss = functional.cross_entropy(outputs.float(), y[None])
        for name, gradient in zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True):
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            squares[name] += float(dense.double().square().sum()) / len(INPUTS)
    for row in rows:
        if row.status == "covered":
            yield row.metrics.exact_trace, sum(squares[name] for name in row.parameters), row.layer


def state(model: nn.Module) -> Any:
    """What must not change: numbers, objects, flags, gradients, modes and hooks, as far as they can be read."""
    tensors = {
        name: (id(tensor), tensor.requires_grad, tensor.grad, tensor.dtype, _numbers(tensor))
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    modes = {name: getattr(module, "training", None) for name, module in model.named_modules()}
    hooks = {name: len(getattr(module, "_forward_hooks", ())) for name, module in model.named_modules()}
    return tensors, modes, hooks


def _numbers(tensor: Tensor) -> list[Any] | None:
    if nn.parameter.is_lazy(tensor) or tensor.is_meta or (tensor.layout == torch.strided and not _bytes_of(tensor)):
        return None
    dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    return [*dense.double().flatten().tolist()]


def _bytes_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_a_module_is_measured_by_autograds_figure_or_refused_with_a_remedy(name: str) -> None:
    build, ends = CASES[name]
    model = build()
    before = state(model) if isinstance(model, nn.Module) else None
    refusals = TypeError if name == "exported_program" else EngineError
    rows, said = [], ""
    try:
        rows = told(model)
    except refusals as error:
        said = str(error)
    if before is not None:
        assert state(model) == before
    if said:
        assert ends != WHOLE, said
        assert re.search(ends, said), said
        return
    reasons = {row.reason for row in rows if row.status == "declared"}
    assert reasons == (set() if ends == WHOLE else {ends})
    figures(model, rows)


def figures(model: nn.Module, rows: list[LayerResult]) -> None:
    """Hold the rows against autograd, by the precision that the module computes in."""
    narrow = any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in model.parameters())
    for measured, expected, layer in traces(model, rows):
        assert measured == pytest.approx(expected, rel=0.1 if narrow else 1e-4), layer


@pytest.mark.parametrize("name", ["partly_quantised", "sparse_by_rows"])
@pytest.mark.filterwarnings("ignore")
def test_the_remedy_of_a_part_that_keeps_its_type_works(name: str) -> None:
    model = CASES[name][0]()
    # one at a time: inputs are quantised by the largest number of a whole batch
    rows = told(model, "float32", batch_size=1)
    assert {row.status for row in rows} >= {"covered"}
    figures(model, rows)


@pytest.mark.filterwarnings("ignore")
def test_a_part_that_quantises_by_the_batch_is_refused_for_that() -> None:
    said = "could be measured: examples_mix.*depends on the others.*; compute the outputs of each example from that"
    with pytest.raises(EngineError, match=said):
        told(partly_quantised(), "float32")


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_wrappers_of_a_group_are_measured_or_refused() -> None:
    wrapped = nn.parallel.DistributedDataParallel(plain())
    rows = told(wrapped)
    assert {row.layer for row in rows if row.status == "covered"} == {"module.0", "module.2"}
    figures(wrapped, rows)
    sharded = fully_shard(plain())
    rows = told(sharded)
    assert [row.status for row in rows] == ["covered", "covered"]
    whole = {row.layer: row.metrics.exact_trace for row in told(plain())}
    assert {row.layer: row.metrics.exact_trace for row in rows} == pytest.approx(whole, rel=1e-12)
    spread = plain()
    mesh = init_device_mesh("cpu", (1,))
    spread[0].weight = nn.Parameter(distribute_tensor(spread[0].weight.data, mesh, [Replicate()]))
    with pytest.raises(EngineError, match=r"`0.weight` is sharded over ranks \(DTensor\).*apply `torch.distributed"):
        told(spread)


def test_data_made_in_inference_mode_are_data() -> None:
    with torch.inference_mode():
        inputs = INPUTS * 1.0
    model = plain()
    found = measure(model, (inputs, TARGETS), task="classification", kinds=("factors",),
                    collection={"fisher": "empirical", "dtype": "float64"})  # fmt: skip
    figures(model, list(found.layers))
