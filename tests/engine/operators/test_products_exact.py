"""Exact products against dense float64 matrices by autodiff, for every curvature, likelihood, net and weighing."""

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from engine.collection.pass_job import PassJob
from engine.errors import ModelRefused, NoLikelihood, UsageError, WrongShape
from engine.factors.factor_set import ParameterShape
from engine.model.counter_rng import categories, normals, uniforms
from engine.model.determinism import Numerics
from engine.operators.blocks import Block, Piece
from engine.operators.exact.output_curvature import OutputCurvature
from engine.operators.products import Curvature, ExactCurvature
from engine.workspace import Workspace
from tests.oracles import relative_error, workspace

EXACT = 1e-10


class Tied(nn.Module):
    """An embedding whose table is the head's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3)
        self.mix = nn.Linear(3, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.head(torch.tanh(self.mix(self.table(ids))).mean(1))
        return hidden


class Attending(nn.Module):
    """Fused attention, a norm, a layer used twice, a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Linear(4, 12)
        self.norm = nn.LayerNorm(4)
        self.twice = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4)
        self.frozen.weight.requires_grad_(False)
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.packed(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = self.norm(x + mixed.transpose(1, 2).flatten(2))
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        found: Tensor = self.head(nn.functional.gelu(self.frozen(x)).mean(1))
        return found


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 3, batch_first=True)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.lstm(x)[0][:, -1])
        return found


class Packed(nn.Module):
    """Torch's own attention, whose fast path has no derivatives, and bags of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(7, 4, mode="sum", sparse=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.bags(ids.flatten(0, 1).unsqueeze(-1)).view(*ids.shape, 4)
        found: Tensor = self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))
        return found


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(4, 3), nn.Softplus(),
    )  # fmt: skip


def numbers(*shape: int) -> Tensor:
    return torch.randn(9, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def ids(length: int) -> Tensor:
    return torch.randint(0, 7, (9, length), generator=torch.Generator().manual_seed(4))


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "perceptron": (perceptron, lambda: numbers(3)),
    "tied": (Tied, lambda: ids(4)),
    "convolutions": (convolutions, lambda: numbers(2, 4, 4)),
    "attending": (Attending, lambda: numbers(5, 4)),
    "recurrent": (Recurrent, lambda: numbers(4, 3)),
    "packed": (Packed, lambda: ids(3)),
}


def made(net: str) -> tuple[nn.Module, Tensor]:
    make, inputs = NETS[net]
    torch.manual_seed(0)
    model = make().double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()  # type: ignore[union-attr]
            module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    return model, inputs()


def targets_of(model: nn.Module, x: Tensor, loss: str) -> Tensor:
    with torch.no_grad():
        like = model(x)
    generator = torch.Generator().manual_seed(5)
    if loss == "cross_entropy":
        return torch.randint(0, like.shape[-1], like.shape[:-1], generator=generator)
    drawn = torch.rand(like.shape, dtype=torch.float64, generator=generator)
    return drawn.round() if loss == "bce" else drawn


def exact(space: Workspace, of: Curvature, updates: int = 1, **options: Any) -> ExactCurvature:
    assert space.inputs.model is not None
    assert space.inputs.task is not None
    model = space.inputs.model
    micro_batch = options.pop("micro_batch", None)
    job = PassJob(
        workspace=space, model=model, task=space.inputs.task, collection=space.options.collection,
        dtype=torch.float64, numerics=Numerics.here(space.machine.device, None), heard=set(), micro_batch=micro_batch,
    )  # fmt: skip
    shapes = tuple(ParameterShape(name=name, shape=tuple(p.shape)) for name, p in trainable(model).items())
    return ExactCurvature(job=job, of=of, updates=updates, report=lambda: None, parameters=shapes, **options)


def trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def product(space: Workspace, of: Curvature, flat: Tensor, **options: Any) -> Tensor:
    found = exact(space, of, **options)
    with found.prepared():
        return found.product(flat)


def summed(outputs: Tensor, targets: Tensor, task: Any) -> Tensor:
    """Torch's own loss of one example, summed over its terms."""
    loss, width = task.likelihood, outputs.shape[-1]
    if loss == "cross_entropy":
        weights = None if task.class_weights is None else torch.tensor(task.class_weights, dtype=outputs.dtype)
        return nn.functional.cross_entropy(
            outputs.reshape(-1, width), targets.reshape(-1), weight=weights, reduction="sum",
            ignore_index=task.ignore_index, label_smoothing=task.label_smoothing,
        )  # fmt: skip
    if loss == "mse":
        return (outputs - targets).square().sum() / width
    return nn.functional.binary_cross_entropy_with_logits(outputs, targets, reduction="sum") / width


def example_matrices(
    model: nn.Module, x: Tensor, y: Tensor, task: Any, of: Curvature, index: Sequence[int], samples: int = 1
) -> list[Tensor]:
    """Each example's matrix of the summed loss, by autodiff of the example alone."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if getattr(module, "sparse", None) is True:
            module.sparse = False
    plain = trainable(model)
    count = sum(p.numel() for p in plain.values())
    found = []
    for own, target, key in zip(x, y, index, strict=True):

        def outputs(flat: Tensor, own: Tensor = own) -> Tensor:
            parts = dict(zip(plain, torch.split(flat, [p.numel() for p in plain.values()]), strict=True))
            with_shape = {name: parts[name].view(p.shape) for name, p in plain.items()}
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                return functional_call(model, with_shape, (own[None],))[0]  # type: ignore[no-any-return]

        at = torch.cat([p.reshape(-1) for p in plain.values()])
        if of == "hessian":
            loss = functools.partial(lambda flat, t, f: summed(f(flat), t, task), t=target, f=outputs)
            found.append(torch.autograd.functional.hessian(loss, at))
            continue
        f = outputs(at)
        jacobian = torch.autograd.functional.jacobian(outputs, at).reshape(f.numel(), count)
        if of == "ggn":
            middle = hessian(lambda out, t=target: summed(out, t, task))(f).reshape(f.numel(), f.numel())
            found.append(jacobian.T @ middle @ jacobian)
        elif of == "empirical":
            g = jacobian.T @ jacrev(lambda out, t=target: summed(out, t, task))(f).reshape(-1)
            found.append(torch.outer(g, g))
        else:
            total = torch.zeros(count, count, dtype=torch.float64)
            for sample in range(samples):
                g = jacobian.T @ drawn_gradient(f, key, task, sample).reshape(-1)
                total += torch.outer(g, g) / samples
            found.append(total)
    return found


def drawn_gradient(f: Tensor, key: int, task: Any, sample: int) -> Tensor:
    """The gradient at labels that are a function of (seed 0, example, term, sample[, output])."""
    width = f.shape[-1]
    if task.likelihood == "cross_entropy":
        flat = f.reshape(-1, width)
        chances = torch.softmax(flat, -1)
        term = torch.arange(len(flat))
        labels = categories(chances, uniforms(0, torch.full_like(term, key), term, sample))
        return chances - nn.functional.one_hot(labels, width)
    component = torch.arange(width)
    keys = (torch.full_like(component, key), torch.zeros_like(component), sample, component)
    if task.likelihood == "mse":
        return -2 * normals(0, *keys) * math.sqrt(0.5 / width)
    chances = torch.sigmoid(f)
    return (chances - (uniforms(0, *keys) < chances).double()) / math.sqrt(width)


def vectors(size: int, columns: int) -> Tensor:
    return torch.randn(size, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(6))


def size_of(model: nn.Module) -> int:
    return sum(p.numel() for p in trainable(model).values())


@pytest.mark.part(of=48, by=("net", "of"))
@pytest.mark.parametrize("of", ["ggn", "hessian", "fisher", "empirical"])
@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "bce"])
@pytest.mark.parametrize("net", list(NETS))
def test_products_are_those_of_the_dense_matrix(net: str, loss: str, of: Curvature) -> None:
    model, x = made(net)
    y = targets_of(model, x, loss)
    space = workspace(model, [(x, y)], "regression" if loss == "mse" else "classification", loss, batch_size=9)
    if (net, of) == ("packed", "hessian"):
        with pytest.raises(ModelRefused, match="_embedding_bag_backward"):
            product(space, of, vectors(size_of(model), 1))
        return
    matrix = torch.stack(example_matrices(model, x, y, space.inputs.task, of, range(9))).mean(0)
    v = vectors(size_of(model), 3)
    found = product(space, of, v)
    assert relative_error(found, matrix @ v) < EXACT
    single = product(space, of, v[:, 0])
    assert single.shape == v[:, 0].shape
    assert relative_error(single, matrix @ v[:, 0]) < EXACT


@pytest.mark.parametrize("of", ["ggn", "hessian", "fisher", "empirical"])
def test_class_weights_ignored_targets_and_smoothing_weigh_as_in_torch(of: Curvature) -> None:
    model, x = made("perceptron")
    y = targets_of(model, x, "cross_entropy")
    y[4] = -100
    space = workspace(model, [(x, y)], "classification", batch_size=9)
    assert space.inputs.task is not None
    options: dict[str, Any] = {"class_weights": (1.0, 3.0, 0.5), "label_smoothing": 0.1}
    if of in ("fisher", "empirical"):
        # there a weight is a count: integer ones repeat the example
        options = {"class_weights": (1.0, 3.0, 2.0)}
    space.inputs.task = task = replace(space.inputs.task, **options)
    weights = torch.tensor(task.class_weights, dtype=torch.float64)
    kept = [place for place in range(9) if place != 4]
    plain = task if of in ("ggn", "hessian") else replace(task, class_weights=None)
    matrices = example_matrices(model, x[kept], y[kept], plain, of, kept)
    if of in ("fisher", "empirical"):
        matrices = [own * weights[y[place]] for own, place in zip(matrices, kept, strict=True)]
    matrix = torch.stack(matrices).sum(0) / weights[y[kept]].sum()
    v = vectors(size_of(model), 2)
    assert relative_error(product(space, of, v), matrix @ v) < EXACT


def test_positive_weights_of_bce_weigh_as_in_torch() -> None:
    model, x = made("perceptron")
    y = targets_of(model, x, "bce")
    space = workspace(model, [(x, y)], "classification", "bce", batch_size=9)
    assert space.inputs.task is not None
    space.inputs.task = replace(space.inputs.task, positive_weights=(2.0, 0.5, 1.5))
    weights = torch.tensor((2.0, 0.5, 1.5), dtype=torch.float64)
    parameters = list(model.parameters())
    at = torch.cat([p.detach().reshape(-1) for p in parameters])

    def loss(flat: Tensor) -> Tensor:
        parts = torch.split(flat, [p.numel() for p in parameters])
        named = {name: own.view(p.shape) for (name, p), own in zip(model.named_parameters(), parts, strict=True)}
        return nn.functional.binary_cross_entropy_with_logits(
            functional_call(model, named, (x,)), y, pos_weight=weights
        )

    v = vectors(size_of(model), 2)
    assert relative_error(product(space, "hessian", v), hessian(loss)(at) @ v) < EXACT


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("of", ["ggn", "hessian", "fisher", "empirical"])
def test_batches_and_micro_batches_do_not_matter(of: Curvature) -> None:
    model, x = made("attending")
    y = targets_of(model, x, "cross_entropy")
    v = vectors(size_of(model), 2)
    whole = product(workspace(model, [(x, y)], "classification", batch_size=9), of, v, samples=2)
    for micro_batch in (1, 2, 9):
        for batch_size in (9, 4):
            space = workspace(model, [(x, y)], "classification", batch_size=batch_size)
            found = product(space, of, v, samples=2, micro_batch=micro_batch, updates=-(-9 // batch_size))
            assert relative_error(found, whole) < EXACT


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("of", ["ggn", "hessian", "fisher", "empirical"])
def test_only_what_entered_the_factors_enters_with_its_weight(of: Curvature) -> None:
    model, x = made("perceptron")
    y = targets_of(model, x, "cross_entropy")
    space = workspace(model, [(x, y)], "classification", batch_size=3, update_freq=2, ema_decay=0.5)
    matrices = example_matrices(model, x, y, space.inputs.task, of, range(9))
    first, last = torch.stack(matrices[:3]).mean(0), torch.stack(matrices[6:]).mean(0)
    v = vectors(size_of(model), 2)
    assert relative_error(product(space, of, v, updates=2), (0.5 * first + last) / 1.5 @ v) < EXACT


def test_several_samples_are_averaged_and_keyed_by_the_example() -> None:
    model, x = made("perceptron")
    y = targets_of(model, x, "cross_entropy")
    index = torch.tensor([5, 3, 8, 11, 2, 0, 19, 7, 6])
    space = workspace(model, [(x, y, index)], "classification", batch_size=4)
    matrices = example_matrices(model, x, y, space.inputs.task, "fisher", index.tolist(), samples=3)
    v = vectors(size_of(model), 2)
    assert relative_error(product(space, "fisher", v, updates=3, samples=3), torch.stack(matrices).mean(0) @ v) < EXACT


@pytest.mark.nightly(
    covered_by=(
        "tests/engine/operators/test_products_exact.py::test_products_are_those_of_the_dense_matrix",
        "tests/engine/operators/test_products_exact.py::test_several_samples_are_averaged_and_keyed_by_the_example",
    )
)
def test_the_fishers_mean_over_seeds_is_the_gauss_newton() -> None:
    model, x = made("perceptron")
    y = targets_of(model, x, "cross_entropy")
    v = vectors(size_of(model), 1)[:, 0]
    truth = float(v @ product(workspace(model, [(x, y)], "classification", batch_size=9), "ggn", v))
    drawn = [
        float(v @ product(workspace(model, [(x, y)], "classification", batch_size=9, seed=seed), "fisher", v))
        for seed in range(96)
    ]
    forms = torch.tensor(drawn, dtype=torch.float64)
    error = float(forms.std()) / math.sqrt(len(drawn))
    assert error < 0.1 * truth
    assert abs(float(forms.mean()) - truth) < 2.5 * error


@pytest.mark.parametrize("of", ["ggn", "hessian"])
def test_blocks_are_diagonal_blocks_of_the_whole(of: Curvature) -> None:
    model, x = made("perceptron")
    y = targets_of(model, x, "cross_entropy")
    space = workspace(model, [(x, y)], "classification", batch_size=9)
    matrix = torch.stack(example_matrices(model, x, y, space.inputs.task, of, range(9))).mean(0)
    pieces = {
        "rows": (Piece(parameter="0.weight", start=3, stop=9), Piece(parameter="0.bias", start=1, stop=3)),
        "head": (Piece(parameter="2.weight", start=0, stop=12), Piece(parameter="0.weight", start=0, stop=3)),
    }
    places = {"rows": [*range(3, 9), 13, 14], "head": [*range(16, 28), *range(3)]}
    blocks = [Block(name=name, pieces=own) for name, own in pieces.items()]
    own = [vectors(block.size, 1)[:, 0] for block in blocks]
    found = exact(space, of)
    with found.prepared():
        products = found.block_products(blocks, own)
    for block, vector, each in zip(blocks, own, products, strict=True):
        rows = places[block.name]
        assert relative_error(each, matrix[rows][:, rows] @ vector) < EXACT


def test_any_dtype_comes_back_as_it_was_given() -> None:
    model, x = made("perceptron")
    y = targets_of(model, x, "cross_entropy")
    space = workspace(model, [(x, y)], "classification", batch_size=9)
    v = vectors(size_of(model), 2)
    narrow = product(space, "ggn", v.float())
    assert narrow.dtype == torch.float32
    assert relative_error(narrow.double(), product(space, "ggn", v.float().double())) < 1e-6
    flags = [p.requires_grad for p in model.parameters()]
    assert flags == [True] * len(flags)
    assert all(p.grad is None for p in model.parameters())


def test_a_vector_of_another_length_is_refused_with_both_lengths() -> None:
    model, x = made("perceptron")
    space = workspace(model, [(x, targets_of(model, x, "cross_entropy"))], "classification")
    with pytest.raises(UsageError, match=rf"\({size_of(model)},\).*got \(5,\)"):
        product(space, "ggn", vectors(5, 1)[:, 0])


def test_the_models_own_loss_has_no_curvature_that_is_known() -> None:
    model, x = made("perceptron")
    space = workspace(
        model, [(x, targets_of(model, x, "cross_entropy"))], "classification", "model", fisher="empirical"
    )
    with pytest.raises(NoLikelihood, match="name the loss"):
        product(space, "ggn", vectors(size_of(model), 1))


def test_a_hessian_needs_targets_and_a_gauss_newton_none() -> None:
    model, x = made("perceptron")
    space = workspace(model, [(x, None)], "classification", batch_size=9)
    v = vectors(size_of(model), 1)
    assert bool(product(space, "ggn", v).isfinite().all())
    with pytest.raises(WrongShape, match="needs targets"):
        product(space, "hessian", v)


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("of", ["ggn", "hessian", "fisher", "empirical"])
def test_memory_that_runs_out_halves_the_micro_batches(of: Curvature, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made("perceptron")
    y = targets_of(model, x, "cross_entropy")
    v = vectors(size_of(model), 2)
    expected = product(workspace(model, [(x, y)], "classification", batch_size=9), of, v)
    space = workspace(model, [(x, y)], "classification", batch_size=9)
    heard: list[str] = []
    space.ports.log = lambda _, message: heard.append(message)
    real = OutputCurvature.product_

    def scarce(self: OutputCurvature, tangent: Tensor) -> tuple[Tensor, Tensor]:
        if self.prediction.outputs.shape[0] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, tangent)

    monkeypatch.setattr(OutputCurvature, "product_", scarce)
    assert relative_error(product(space, of, v), expected) < EXACT
    assert any("it goes on with 2 examples at a time" in message for message in heard)


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.layer(x), 0.5, training=True)


@pytest.mark.parametrize("of", ["ggn", "hessian"])
def test_a_model_that_drops_out_in_evaluation_is_refused(of: Curvature) -> None:
    model, x = Drops().double(), numbers(3)
    space = workspace(model, [(x, torch.zeros(9, dtype=torch.int64))], "classification")
    with pytest.raises(ModelRefused, match="two forward passes differ"):
        product(space, of, vectors(size_of(model), 1))


def gpt2(attention: str) -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=12, n_head=3, vocab_size=23, n_positions=16, attn_implementation=attention, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double().eval()


def llama(attention: str) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=12, intermediate_size=20, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=23, max_position_embeddings=16, attn_implementation=attention, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


def texts(padded: bool) -> tuple[dict[str, Tensor], Tensor]:
    tokens = torch.randint(0, 23, (5, 9), generator=torch.Generator().manual_seed(8))
    mask = torch.ones_like(tokens)
    if padded:
        for row, length in enumerate((9, 4, 7, 9, 5)):
            mask[row, length:] = 0
    return {"input_ids": tokens, "attention_mask": mask}, tokens


SWITCHES = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")


@pytest.mark.part(of=32, by=("make",))
@pytest.mark.parametrize("of", ["ggn", "hessian", "fisher", "empirical"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_language_models_with_fused_attention_are_as_with_eager(
    make: Callable[[str], nn.Module], padded: bool, of: Curvature
) -> None:
    before = [getattr(torch.backends.cuda, name)() for name in SWITCHES]
    found = []
    for attention in ("sdpa", "eager"):
        model = make(attention)
        space = workspace(model, [texts(padded)], "causal_lm", batch_size=5)
        v = vectors(size_of(model), 2)
        exact_one = exact(space, of)
        with exact_one.prepared():
            found.append(exact_one.product(v))
            assert [getattr(torch.backends.cuda, name)() for name in SWITCHES] == before
        assert exact_one.learnt.route is None
    assert relative_error(found[0], found[1]) < 1e-6
    assert [getattr(torch.backends.cuda, name)() for name in SWITCHES] == before


@pytest.mark.parametrize("of", ["ggn", "hessian"])
def test_a_language_models_product_is_that_of_plain_autograd(of: Curvature) -> None:
    model = gpt2("eager")
    inputs, tokens = texts(padded=True)
    space = workspace(model, [(inputs, tokens)], "causal_lm", batch_size=5)
    v = vectors(size_of(model), 1)[:, 0]
    names = [name for name, _ in model.named_parameters()]
    at = tuple(p.detach() for p in model.parameters())
    seen = (inputs["attention_mask"][:, 1:] & inputs["attention_mask"][:, :-1]).bool()

    def outputs(*parameters: Tensor) -> Tensor:
        logits = functional_call(model, dict(zip(names, parameters, strict=True)), (), inputs, tie_weights=True).logits
        return logits[:, :-1][seen]  # type: ignore[no-any-return]

    def loss(*parameters: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs(*parameters), tokens[:, 1:][seen])

    parts = tuple(own.view(p.shape) for own, p in zip(torch.split(v, [p.numel() for p in at]), at, strict=True))
    if of == "hessian":
        truth = torch.autograd.functional.hvp(loss, at, parts)[1]
    else:
        f, pushed = torch.autograd.functional.jvp(outputs, at, parts)
        chances = torch.softmax(f, -1)
        middle = (chances * pushed - chances * (chances * pushed).sum(-1, keepdim=True)) / len(f)
        truth = torch.autograd.functional.vjp(outputs, at, middle)[1]
    found = product(workspace(gpt2("sdpa"), [(inputs, tokens)], "causal_lm", batch_size=5), of, v)
    assert relative_error(found, torch.cat([part.reshape(-1) for part in truth])) < EXACT
    assert space.inputs.model is model
