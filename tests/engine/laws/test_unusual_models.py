"""Models that call, wrap, write to or run their layers in ways that once gave other factors without a word."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from engine.errors import ModelRefused, NothingToAnalyse
from engine.factors.factor_set import FactorSet
from tests.oracles import collect, relative_error, same_facts

EXACT = 1e-12


def examples(count: int = 8, width: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, width, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, width, (count,), generator=generator)


class Three(nn.Module):
    """Three linear maps, joined by the function that a test gives."""

    def __init__(self, join: Callable[["Three", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.join = join
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self, x)


def measured(join: Callable[[Three, Tensor], Tensor], **options: Any) -> FactorSet:
    x, y = examples()
    return collect(Three(join), [(x, y)], "classification", **options)


def expected(rows: Tensor) -> Tensor:
    """A of ``rows`` with a column of ones."""
    rows = torch.cat([rows, rows.new_ones(rows.shape[0], 1)], 1)
    return rows.T @ rows / rows.shape[0]


def gradient_moment(model: nn.Module, layer: nn.Linear) -> Tensor:
    """G of the empirical Fisher of a layer called once a forward pass, from its bias's gradients."""
    x, y = examples()
    total = torch.zeros(4, 4, dtype=torch.float64)
    for row in range(x.shape[0]):
        loss = functional.cross_entropy(model(x[row : row + 1]), y[row : row + 1])
        (gradient,) = torch.autograd.grad(loss, [layer.bias])
        total += torch.outer(gradient, gradient) / x.shape[0]
    return total


def test_layers_share_in_whatever_order_they_are_called() -> None:
    whole = measured(lambda m, x: m.v(x) + m.k(x) * 2 + m.q(x))
    assert [layer.shared_A_with for layer in whole.layers] == [None, 0, 0]
    assert whole.passes == 1
    assert relative_error(whole.load(2).A, expected(examples()[0])) < EXACT


def test_a_tensor_written_to_between_two_layers_is_not_shared() -> None:
    def join(model: Three, x: Tensor) -> Tensor:
        x = x.clone()
        q = model.q(x)
        x.mul_(3)
        return q + model.k(x) + model.v(x)

    whole = measured(join)
    assert [layer.shared_A_with for layer in whole.layers] == [None, None, 1]
    assert relative_error(whole.load(0).A, expected(examples()[0])) < EXACT
    assert relative_error(whole.load(1).A, expected(3 * examples()[0])) < EXACT


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize("change", ["leader twice", "leader never", "follower never", "written to"])
def test_sharing_that_breaks_later_is_undone_whoever_breaks_it(change: str) -> None:
    x, y = examples()
    marked = x.clone()
    marked[4:, 0] = 100.0

    def join(model: Three, x: Tensor) -> Tensor:
        if float(x[0, 0]) != 100.0:
            return model.q(x) + model.k(x)
        if change == "leader twice":
            return model.q(x) + model.k(x) + model.q(x * 2)
        if change == "leader never":
            return model.k(x)
        if change == "follower never":
            return model.q(x)
        q, x = model.q(x), x.mul_(2)
        return q + model.k(x)

    whole = collect(Three(join), [(marked, y)], "classification", batch_size=4)
    entered_q = {"leader twice": [x, x * 2], "leader never": []}.get(change, [x])
    entered_k = {"follower never": [], "written to": [x * 2]}.get(change, [x])
    for ordinal, seen in enumerate((entered_q, entered_k)):
        late = [torch.cat([part[4:, :1] / x[4:, :1] * 100, part[4:, 1:]], 1) for part in seen]
        truth = expected(torch.cat([x[:4], *late]))
        assert relative_error(whole.load(ordinal).A, truth) < EXACT
    assert [layer.shared_A_with for layer in whole.layers] == [None, None]
    # what is written over is read anew: one more
    assert whole.passes == (3 if change == "written to" else 2)


@pytest.mark.part(of=16, by=("reentrant",))
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("fisher", ["mc", "type2"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_activation_checkpointing_changes_nothing(fisher: str, reentrant: bool) -> None:
    def inner(model: Three, h: Tensor) -> Tensor:
        return model.k(h) + model.v(h)

    def wrapped(model: Three, x: Tensor) -> Tensor:
        return checkpoint(lambda h: inner(model, h), torch.tanh(model.q(x)), use_reentrant=reentrant)

    plain = measured(lambda m, x: inner(m, torch.tanh(m.q(x))), fisher=fisher)
    saved = measured(wrapped, fisher=fisher)
    assert same_facts(saved, plain)
    assert saved.passes == 1
    for ordinal in range(3):
        assert relative_error(saved.load(ordinal).A, plain.load(ordinal).A) < EXACT
        assert relative_error(saved.load(ordinal).G, plain.load(ordinal).G) < EXACT


def test_a_call_without_a_graph_is_none_of_the_loss() -> None:
    def join(model: Three, x: Tensor) -> Tensor:
        with torch.no_grad():
            constant = model.q(x * 5)
        return model.k(torch.tanh(model.q(x))) + constant

    whole = measured(join)
    assert (whole.layers[0].calls, whole.layers[0].positions) == (2, 8)
    assert relative_error(whole.load(0).A, expected(examples()[0])) < EXACT


def test_writing_into_outputs_and_views_of_them_is_seen_by_autograd() -> None:
    def join(model: Three, x: Tensor) -> Tensor:
        h = model.q(x)
        h[:, 1] = 0.0
        h = torch.relu_(h)
        y = model.k(h)
        y[:, ::2].mul_(2)
        return model.v(torch.tanh(y.add_(h)))

    model = Three(join)
    whole = measured(join, fisher="empirical")
    for ordinal, layer in enumerate((model.q, model.k, model.v)):
        assert relative_error(whole.load(ordinal).G, gradient_moment(model, layer)) < EXACT


def test_gradients_are_those_of_the_layer_whatever_a_hook_makes_of_its_output() -> None:
    model = Three(lambda m, x: m.v(torch.tanh(m.q(x))))
    model.q.register_forward_hook(lambda _, __, output: output * 3)
    x, y = examples()
    whole = collect(model, [(x, y)], "classification", fisher="empirical")
    assert relative_error(whole.load(0).G, gradient_moment(model, model.q)) < EXACT


def test_a_forward_replaced_on_one_module_is_seen_through() -> None:
    model = Three(lambda m, x: m.v(torch.tanh(m.q(x))))
    original = model.q.forward
    model.q.forward = lambda x: original(x) * 3  # type: ignore[method-assign]
    x, y = examples()
    whole = collect(model, [(x, y)], "classification", fisher="empirical")
    assert [(layer.name, layer.reason) for layer in whole.declared] == [("k", "no_gradient")]
    assert relative_error(whole.load(0).G, gradient_moment(model, model.q)) < EXACT


def test_positions_before_examples_are_told_apart_even_where_there_are_as_many() -> None:
    class Sequential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)
            self.turned = True

        def forward(self, x: Tensor) -> Tensor:
            if self.turned:
                return self.head(self.norm(self.inner(x.transpose(0, 1))).transpose(0, 1))
            return self.head(self.norm(self.inner(x)))

    x = torch.randn(8, 4, 4, dtype=torch.float64)
    model = Sequential().double()
    whole = collect(model, [(x, x)], "regression", sharing="reduce", batch_size=4, min_coverage=1.0)
    model.turned = False
    plain = collect(model, [(x, x)], "regression", sharing="reduce", batch_size=4)
    factors, truth = ({layer.name: w.load(layer.ordinal) for layer in w.layers} for w in (whole, plain))
    for name in ("inner", "head"):
        assert relative_error(factors[name].A, truth[name].A) < EXACT
        assert relative_error(factors[name].G, truth[name].G) < EXACT
    # weight and bias of the norm apart, as the diagonal of their one block
    diagonal = torch.cat([factors["norm"].G, factors["norm.bias"].G])
    assert relative_error(diagonal, truth["norm"].G.diagonal()) < EXACT


def test_flattened_positions_are_those_of_their_examples() -> None:
    class Flat(nn.Module):
        def __init__(self, flat: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner, self.norm, self.head = nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 9)
            self.flat = flat

        def forward(self, inputs: Tensor, attention_mask: Tensor) -> Tensor:
            x = inputs.reshape(-1, 4) if self.flat else inputs
            return self.head(torch.tanh(self.norm(self.inner(x)))).view(*inputs.shape[:2], 9)

    x, ids = torch.randn(6, 5, 4, dtype=torch.float64), torch.randint(0, 9, (6, 5))
    mask = torch.rand(6, 5) > 0.3
    chunk = ({"inputs": x, "attention_mask": mask}, ids)
    for sharing in ("expand", "reduce"):
        flat, deep = (collect(Flat(flag).double(), [chunk], "causal_lm", sharing=sharing) for flag in (True, False))
        assert same_facts(flat, deep)
        for ordinal in range(3):
            assert relative_error(flat.load(ordinal).A, deep.load(ordinal).A) < EXACT
            assert relative_error(flat.load(ordinal).G, deep.load(ordinal).G) < EXACT


def test_an_example_without_any_position_counts_nowhere() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.head(self.table(input_ids))

    ids, mask = torch.randint(0, 9, (4, 5)), torch.ones(4, 5, dtype=torch.int64)
    mask[3] = 0
    pair = [
        collect(
            Tokens().double(), [({"input_ids": ids[:n], "attention_mask": mask[:n]}, ids[:n])], "causal_lm",
            sharing="reduce",
        )
        for n in (3, 4)
    ]  # fmt: skip
    assert relative_error(pair[1].load(1).A, pair[0].load(1).A) < EXACT
    assert relative_error(pair[1].load(1).G, pair[0].load(1).G) < EXACT


def test_decayed_counts_below_one_still_normalise() -> None:
    x, y = examples(12)
    x[:, 0] = -1
    x[0, 0] = 1

    def join(model: Three, x: Tensor) -> Tensor:
        h = model.q(x)
        return h + model.k(h) if float(x[0, 0]) > 0 else h

    model = Three(join)
    whole = collect(model, [(x, y)], "classification", batch_size=1, ema_decay=0.5)
    assert relative_error(whole.load(1).A, expected(model.q(x[:1]).detach())) < EXACT


def test_what_the_model_computes_more_narrowly_enters_all_the_same() -> None:
    def narrow(model: Three, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model.v(torch.tanh(model.q(x)))

    half = measured(narrow, dtype="float32", fisher="empirical")
    full = measured(lambda m, x: m.v(torch.tanh(m.q(x))), fisher="empirical")
    for ordinal in range(2):
        assert half.load(ordinal).G.dtype == torch.float32
        assert relative_error(half.load(ordinal).A.double(), full.load(ordinal).A) < 1e-2
        assert relative_error(half.load(ordinal).G.double(), full.load(ordinal).G) < 3e-2


def test_buffers_inputs_and_random_numbers_are_left_alone() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            self.mean = self.mean * 0.9 + x.mean(0)
            return self.head(functional.dropout(x, 0.5, training=True))

    for dtype in ("float32", "float64"):
        model = Counting()
        mean = model.mean
        x, y = examples()
        x.requires_grad_()
        found = []
        for _ in range(2):
            torch.rand(3)  # another state of the generator
            found.append(collect(model, [(x, y)], "classification", dtype=dtype).load(0).A)
        assert torch.equal(found[0], found[1])
        assert float(model.seen) == 0
        assert model.mean is mean
        assert not bool(mean.any())
        assert x.grad is None


def test_compiled_models_are_measured_as_written() -> None:
    x, y = examples()
    plain = Three(lambda m, x: m.v(torch.tanh(m.q(x))))
    compiled = torch.compile(plain, backend="eager")
    functional.cross_entropy(compiled(x), y).backward()
    reference, whole = (collect(model, [(x, y)], "classification") for model in (plain, compiled))
    assert [layer.name for layer in whole.layers] == ["_orig_mod.q", "_orig_mod.v"]
    for ordinal in range(2):
        assert torch.equal(whole.load(ordinal).G, reference.load(ordinal).G)


def test_precision_switches_of_either_kind_are_restored() -> None:
    matmul: Any = torch.backends.cuda.matmul
    for name, value in (("fp32_precision", "tf32"), ("allow_tf32", True)):
        if not hasattr(matmul, name):
            continue
        before = getattr(matmul, name)
        try:
            setattr(matmul, name, value)
            measured(lambda m, x: m.q(x))
            assert getattr(matmul, name) == value
        finally:
            setattr(matmul, name, before)


def test_a_collection_inside_inference_mode() -> None:
    model = Three(lambda m, x: m.v(torch.tanh(m.q(x))))
    reference = collect(model, [examples()], "classification")
    with torch.inference_mode():
        whole = collect(model, [examples()], "classification")
    assert relative_error(whole.load(0).G, reference.load(0).G) < EXACT


def test_a_models_own_mean_loss_has_a_term_for_every_vector() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.head = nn.Linear(4, 1)

        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            outputs = self.head(x)
            return outputs if labels is None else (functional.mse_loss(outputs, labels), outputs)

    x, y = torch.randn(6, 5, 4, dtype=torch.float64), torch.randn(6, 5, 1, dtype=torch.float64)
    model = Own().double()
    own, known = (
        collect(model, [(x, y)], "regression", loss, fisher="empirical", batch_size=size)
        for loss, size in (("model", 4), ("mse", 6))
    )
    assert same_facts(own, known)
    assert relative_error(own.load(0).G, known.load(0).G) < EXACT


def test_what_cannot_be_measured_is_refused_by_name() -> None:
    with pytest.raises(NothingToAnalyse, match="could be measured: no_gradient"):
        measured(lambda m, x: m.q(x).detach() + m.k(x).detach())

    def spoiled(model: Three, x: Tensor) -> Tensor:
        h = torch.exp(model.q(x))
        outputs = model.k(h)
        h.add_(1)
        return outputs

    with pytest.raises(ModelRefused, match="in its backward pass"):
        measured(spoiled)
    x, y = examples()
    with pytest.raises(ModelRefused, match=r"`0\.weight` has no shape yet"):
        collect(nn.Sequential(nn.LazyLinear(4)), [(x, y)], "classification")


@pytest.mark.parametrize("wrap", [lambda y: (y, y), lambda y: {"hidden": y, "logits": y}])
def test_outputs_may_stand_in_a_tuple_or_a_mapping(wrap: Callable[[Tensor], Any]) -> None:
    plain = measured(lambda m, x: m.q(x))
    whole = measured(lambda m, x: wrap(m.q(x)))
    assert torch.equal(whole.load(0).G, plain.load(0).G)


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize(("examples", "batch"), [(4, 1), (5, 2), (4, 4)])
@pytest.mark.parametrize("trained", [True, False])
def test_a_batch_norm_on_a_batch_of_one_reads_its_gradient_right(examples: int, batch: int, *, trained: bool) -> None:
    """Tokens taken from a map: torch misreads a batch norm's gradient where a batch of one leaves its order open."""

    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(2, 4, 3)
            self.norm = nn.BatchNorm2d(4)
            self.mixed = nn.Linear(4, 3)

        def forward(self, images: Tensor) -> Tensor:
            return self.mixed(self.norm(self.convolution(images)).flatten(2).transpose(1, 2)).sum(1)

    torch.manual_seed(0)
    model = Stem().double()
    with torch.no_grad():
        model.norm.running_mean.normal_()  # type: ignore[union-attr]
        model.norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    model.norm.requires_grad_(trained)
    images, targets = torch.randn(examples, 2, 5, 5, dtype=torch.double), torch.zeros(examples, 3, dtype=torch.double)
    whole = collect(model, [(images, targets)], "regression", batch_size=batch)
    layer = next(place for place, facts in enumerate(whole.layers) if facts.name == "convolution")
    # a linear stem: the gradient of every position is the same whatever the batch, and known in closed form
    scale = model.norm.weight / (model.norm.running_var + model.norm.eps).sqrt()  # type: ignore[operator]
    pulled = (model.mixed.weight * scale).detach()
    expected = 9 * 2 / 3 * pulled.T @ pulled
    assert relative_error(whole.load(layer).G, expected) < 1e-12
