"""The loss of an episode: terms that sum to the loss written out, however the queries are sliced."""

import re

import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from engine.fewshot.episode_loss import EpisodeLoss
from engine.fewshot.heads import METHODS, make_head
from engine.fewshot.regulariser import VicWeights, covariance, variance

WAYS, SHOTS, QUERIES = 3, 2, 4
SIZE = SHOTS + QUERIES
SHAPE = (6, 2, 2)
WEIGHTS, THRESHOLD = VicWeights(0.7, 9.0, 0.3), 1.2
TRANSFORMERS = [method for method in METHODS if "FSCT" in method or "ProFOCT" in method]


def features_of(shape: tuple[int, ...] = SHAPE, ways: int = WAYS) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    classes = torch.randn(ways, 1, *shape, generator=generator, dtype=torch.float64)
    images = torch.randn(ways, SIZE, *shape, generator=generator, dtype=torch.float64)
    return (0.5 * classes + 0.5 * images).flatten(0, 1).requires_grad_()


def loss_of(method: str, *, shape: tuple[int, ...] = SHAPE, **options: object) -> EpisodeLoss:
    torch.manual_seed(1)
    head = make_head(method, k_shot=SHOTS, feature_shape=shape, heads=2, head_dim=4, hidden=8).double()
    chosen: dict[str, object] = {"vic": (WEIGHTS, THRESHOLD), **options}
    return EpisodeLoss(head=head, n_way=WAYS, k_shot=SHOTS, n_query=QUERIES, **chosen)  # type: ignore[arg-type]


def run(loss: EpisodeLoss, features: Tensor) -> tuple[float, list[Tensor], list[float]]:
    """The sum of the terms, the gradients of features and head, and the terms, each differentiated before the next."""
    everything = [features, *loss.head.parameters()]
    for each in everything:
        each.grad = None
    terms = []
    for term in loss(features):
        term.backward()
        terms.append(float(term.detach()))
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in everything]
    return sum(terms), gradients, terms


def written_out(loss: EpisodeLoss, features: Tensor) -> Tensor:
    """The whole loss as one graph, with the order of an episode spelled image by image."""
    support = torch.stack([torch.stack([features[c * SIZE + j] for j in range(SHOTS)]) for c in range(WAYS)])
    queries = torch.stack([features[c * SIZE + SHOTS + q] for c in range(WAYS) for q in range(QUERIES)])
    scores = log_softmax(loss.head(support, queries), dim=1)
    total = -sum(scores[c * QUERIES + q, c] for c in range(WAYS) for q in range(QUERIES)) / (WAYS * QUERIES)
    if loss.vic is not None:
        rows = [support.reshape(WAYS * SHOTS, -1)]
        if loss.on_attention:
            rows.append(loss.head.attention_output(support, queries).reshape(WAYS * QUERIES * WAYS, -1))
        for share, each in zip((1.0, 0.5), rows, strict=False):
            total = total + share * (WEIGHTS.alpha * variance(each, THRESHOLD) + WEIGHTS.gamma * covariance(each))
    return total


def far(gradients: list[Tensor], others: list[Tensor]) -> float:
    largest = max(float(each.norm()) for each in others)
    return max(float((one - two).norm()) for one, two in zip(gradients, others, strict=True)) / largest


CASES = [
    *((method, False, vic) for method in METHODS for vic in (True, False)),
    *((method, True, True) for method in TRANSFORMERS),
]


@pytest.mark.part(of=12, by=("method",))
@pytest.mark.parametrize(("method", "on_attention", "vic"), CASES)
def test_terms_sum_to_the_loss_written_out_in_slices_of_any_number(method: str, on_attention: bool, vic: bool) -> None:
    features = features_of()
    loss = loss_of(method, on_attention=on_attention, **({} if vic else {"vic": None}))
    everything = [features, *loss.head.parameters()]
    whole = written_out(loss, features)
    gradients = torch.autograd.grad(whole, everything, allow_unused=True, materialize_grads=True)
    for slices in (1, 2, 5, WAYS * QUERIES, 100):
        loss.slices = slices
        total, split, terms = run(loss, features)
        assert total == pytest.approx(float(whole.detach()), rel=1e-12)
        assert far(split, list(gradients)) <= 1e-12
        assert len(terms) == (1 if on_attention else min(slices, WAYS * QUERIES)) + vic


@pytest.mark.parametrize("method", TRANSFORMERS)
def test_a_penalty_on_the_attention_reaches_the_heads_parameters(method: str) -> None:
    features = features_of()
    _, without, _ = run(loss_of(method, on_attention=False), features)
    loss = loss_of(method, on_attention=True)
    _, with_it, _ = run(loss, features)
    names = ["features", *(name for name, _ in loss.head.named_parameters())]
    moved = {
        name
        for name, one, two in zip(names, with_it, without, strict=True)
        if float((one - two).norm()) > 1e-6 * float(two.norm())
    }
    assert {"features", "in_projection.1.weight", "out_projection.weight", "shot_weights"} <= moved
    # neither the readout, nor a shift of all rows, is seen by the penalty
    assert not any(name.startswith("readout") or name == "out_projection.bias" for name in moved)


@pytest.mark.parametrize("on_attention", [False, True])
def test_values_of_the_parts_are_known_afterwards(on_attention: bool) -> None:
    features = features_of()
    loss = loss_of("ProFOCT_cosine", on_attention=on_attention, slices=5)
    assert loss.values is None
    terms = loss(features)
    next(terms)
    assert loss.values is None
    total = run(loss, features)[0]
    assert loss.values is not None
    values = loss.values
    assert values.cross_entropy + WEIGHTS.alpha * values.variance + WEIGHTS.gamma * values.covariance == pytest.approx(
        total, rel=1e-12
    )
    plain = loss_of("ProFOCT_cosine", vic=None)
    assert values.cross_entropy == pytest.approx(run(plain, features)[0], rel=1e-12)
    assert plain.values is not None
    assert (plain.values.variance, plain.values.covariance) == (0, 0)
    support = features.detach().reshape(WAYS, SIZE, -1)[:, :SHOTS].flatten(0, 1)
    assert (values.variance == pytest.approx(float(variance(support, THRESHOLD)), rel=1e-12)) is not on_attention


@pytest.mark.parametrize("slices", [1, 5])
def test_accuracy_is_the_share_of_queries_that_score_highest_for_their_class(slices: int) -> None:
    features = features_of()
    loss = loss_of("ProtoNet", slices=slices)
    hits = 0
    prototypes = [features[c * SIZE : c * SIZE + SHOTS].detach().flatten(1).mean(0) for c in range(WAYS)]
    for c in range(WAYS):
        for q in range(QUERIES):
            query = features[c * SIZE + SHOTS + q].detach().flatten()
            distances = [float((query - each).square().sum()) for each in prototypes]
            hits += distances.index(min(distances)) == c
    assert 0 < hits < WAYS * QUERIES
    assert loss.accuracy(features) == pytest.approx(hits / (WAYS * QUERIES))
    run(loss, features)
    assert loss.values is not None
    assert loss.values.accuracy == pytest.approx(hits / (WAYS * QUERIES))


def test_a_head_is_tested_with_more_classes_than_it_was_trained_with() -> None:
    loss = loss_of("FSCT_cosine")
    wider = EpisodeLoss(head=loss.head, n_way=5, k_shot=SHOTS, n_query=QUERIES)
    assert 0 <= wider.accuracy(features_of(ways=5)) <= 1


def test_terms_are_float32_under_autocast() -> None:
    torch.manual_seed(0)
    features = features_of().detach().bfloat16().requires_grad_()
    for method in METHODS:
        loss = loss_of(method, slices=2)
        loss.head.float()
        with torch.autocast("cpu", torch.bfloat16):
            terms = list(loss(features))
        assert {each.dtype for each in terms} == {torch.float32}


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_runs_on_the_meta_device(method: str) -> None:
    loss = loss_of(method, slices=2, on_attention=method in TRANSFORMERS)
    loss.head.to("meta")
    features = torch.empty(WAYS * SIZE, *SHAPE, device="meta", dtype=torch.float64, requires_grad=True)
    for term in loss(features):
        term.backward()
    assert features.grad is not None
    assert features.grad.is_meta


def test_a_slices_graph_is_free_before_the_next_is_made() -> None:
    features = features_of((4000,))
    loss = loss_of("FSCT_cosine", shape=(4000,), slices=12, vic=None)
    alive: list[int] = []
    now = 0

    def pack(tensor: Tensor) -> tuple[Tensor, object]:
        nonlocal now
        now += tensor.nbytes
        return tensor, Counted(tensor.nbytes)

    class Counted:
        def __init__(self, size: int) -> None:
            self.size = size

        def __del__(self) -> None:
            nonlocal now
            now -= self.size

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[0]):
        for term in loss(features):
            alive.append(now)
            term.backward()
            del term
    assert max(alive) <= 1.01 * alive[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_way": 0}, "must be at least 1 (got 0, 2, 4 and 1)"),
        ({"slices": 0}, "must be at least 1 (got 3, 2, 4 and 0)"),
        ({"on_attention": True}, "needs `vic` and a FSCT or ProFOCT head (got ProtoNet and vic None)"),
    ],
)
def test_what_cannot_be_a_loss_is_refused(options: dict[str, object], message: str) -> None:
    chosen: dict[str, object] = {"n_way": WAYS, "k_shot": SHOTS, "n_query": QUERIES, **options}
    with pytest.raises(ValueError, match=re.escape(message)):
        EpisodeLoss(head=make_head("ProtoNet", k_shot=SHOTS, feature_shape=SHAPE), **chosen)  # type: ignore[arg-type]


def test_features_of_another_number_and_shots_of_another_head_are_refused() -> None:
    loss = loss_of("ProtoNet")
    with pytest.raises(ValueError, match=re.escape("3 classes with 2 + 4 images has 18 features (got 17)")):
        list(loss(features_of()[:-1]))
    with pytest.raises(ValueError, match=re.escape("3 classes with 2 + 4 images has 18 features (got 17)")):
        loss.accuracy(features_of()[:-1])
    other = EpisodeLoss(head=loss_of("FSCT_cosine").head, n_way=WAYS, k_shot=1, n_query=5)
    with pytest.raises(ValueError, match=r"`k_shot` must be 2.*\(got 1\)"):
        list(other(features_of()))
