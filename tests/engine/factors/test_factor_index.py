"""The index of stored factors as somebody else may have written it: every value typed, every tensor by its digest."""

from typing import Any

import pytest
import torch

from engine.errors import BrokenFactors
from engine.factors.factor_files import read_factors
from engine.factors.kronecker_factors import digest, packed
from tests.oracles import MemoryArtifacts

A, G = torch.diag(torch.tensor([1.0, 2.0, 3.0])), torch.diag(torch.tensor([4.0, 5.0]))
LAYER = {
    "ordinal": 0, "name": "head", "module": "Linear", "form": "kronecker", "why": "", "parameters": ["head.weight"],
    "parameter_count": 6, "in_dim": 3, "out_dim": 2, "bias": True, "positions": 1, "terms": 1, "calls": 1,
    "sharing": "expand", "rank_bound_A": 1, "rank_bound_G": None, "shared_A_with": None,
    "activation_covariance": {"file": "0.safetensors", "sha256": digest(A), "scale": 1.0},
    "gradient_covariance": {"file": "0.safetensors", "sha256": digest(G), "scale": 1.0, "metadata": {}},
}  # fmt: skip
INDEX = {
    "format": "kronoscope-factors/1", "collection": {}, "woodbury": {"policy": "dense"}, "trainable_parameters": 6,
    "examples": 1, "updates": 1, "passes": 1, "micro_batch": 1, "nondeterministic": [], "amp": "off",
    "amp_fallback": None, "loss_scale": None, "layers": [LAYER],
    "declared": [{"name": "n", "module": "Norm", "reason": "r", "parameters": ["n.w"], "parameter_count": 1}],
}  # fmt: skip


def store_with(index: Any) -> MemoryArtifacts:
    store = MemoryArtifacts()
    store.save_json("factors/factors.index.json", index)
    store.save_tensors(
        "factors/0.safetensors", {"activation_covariance": packed(A), "gradient_covariance": packed(G)}, {}
    )
    return store


def layer(**changes: Any) -> dict[str, Any]:
    return INDEX | {"layers": [LAYER | changes]}


def test_an_intact_index_is_read() -> None:
    whole = read_factors(store_with(INDEX))
    factors = whole.load(0)
    assert torch.equal(factors.A, A)
    assert torch.equal(factors.G, G)
    assert whole.layers[0].parameters == ("head.weight",)
    assert whole.declared[0].name == "n"


HOSTILE: dict[str, tuple[Any, str]] = {
    "a list for the index": ([], "not of the format"),
    "a format that is a list": (INDEX | {"format": ["kronoscope-factors/1"]}, "not of the format"),
    "layers that are a number": (INDEX | {"layers": 5}, "`layers`"),
    "layers that are an object": (INDEX | {"layers": {"0": LAYER}}, "`layers`"),
    "a layer that is a text": (INDEX | {"layers": ["head"]}, "`layers/0`"),
    "a layer that is a list": (INDEX | {"layers": [[1]]}, "`layers/0`"),
    "no ordinal": (INDEX | {"layers": [{k: v for k, v in LAYER.items() if k != "ordinal"}]}, "`layers/0/ordinal`"),
    "an ordinal that is a text": (layer(ordinal="0"), "`layers/0/ordinal`"),
    "an ordinal that is a flag": (layer(ordinal=False), "`layers/0/ordinal`"),
    "an ordinal below 0": (layer(ordinal=-1), "`layers/0/ordinal`"),
    "one ordinal twice": (INDEX | {"layers": [LAYER, LAYER]}, "`layers/1/ordinal`"),
    "a name that is a list": (layer(name=["head"]), "`layers/0/name`"),
    "a name with half a surrogate pair": (layer(name="\ud800"), "`layers/0/name`"),
    "a form that is a list": (layer(form=["kronecker"]), "`layers/0/form`"),
    "an unknown form": (layer(form="evil"), "`layers/0/form`"),
    "parameters that are a text": (layer(parameters="head"), "`layers/0/parameters`"),
    "parameters that are numbers": (layer(parameters=[1]), "`layers/0/parameters`"),
    "a width that is a text": (layer(in_dim="3"), "`layers/0/in_dim`"),
    "a width that is a fraction": (layer(in_dim=3.0), "`layers/0/in_dim`"),
    "a width of 0": (layer(out_dim=0), "`layers/0/out_dim`"),
    "a width of 10^30": (layer(out_dim=10**30), "`layers/0/out_dim`"),
    "a bias that is a number": (layer(bias=1), "`layers/0/bias`"),
    "a trace that is NaN": (layer(exact_trace=float("nan")), "`layers/0/exact_trace`"),
    "a trace that is infinite": (layer(exact_trace=float("inf")), "`layers/0/exact_trace`"),
    "an A of no layer": (layer(shared_A_with=7), "`layers/0/shared_A_with`"),
    "a kind that is a list": (layer(representation_G=["dense"]), "`layers/0/representation_G`"),
    "a kind that is unknown": (layer(representation_G="evil"), "`layers/0/representation_G`"),
    "a side that is a list": (layer(gradient_covariance=[1]), "`layers/0/gradient_covariance`"),
    "a scale that is a text": (layer(gradient_covariance={"scale": "1"}), "`layers/0/gradient_covariance/scale`"),
    "a scale that is a list": (layer(gradient_covariance={"scale": [1]}), "`layers/0/gradient_covariance/scale`"),
    "a scale of 0": (layer(activation_covariance={"scale": 0.0}), "`layers/0/activation_covariance/scale`"),
    "a scale that is infinite": (
        layer(activation_covariance={"scale": float("inf")}), "`layers/0/activation_covariance/scale`"
    ),
    "a scale of 10^400": (
        layer(activation_covariance={"scale": 10**400}), "`layers/0/activation_covariance/scale`"
    ),
    "metadata that are a list": (
        layer(gradient_covariance={"metadata": ["x"]}), "`layers/0/gradient_covariance/metadata`"
    ),
    "metadata of numbers": (
        layer(gradient_covariance={"metadata": {"x": 1}}), "`layers/0/gradient_covariance/metadata`"
    ),
    "a digest that is a number": (
        layer(gradient_covariance={"sha256": 5}), "`layers/0/gradient_covariance/sha256`"
    ),
    "a digest that is no digest": (
        layer(gradient_covariance={"sha256": "x"}), "`layers/0/gradient_covariance/sha256`"
    ),
    "no declared": ({k: v for k, v in INDEX.items() if k != "declared"}, "`declared`"),
    "declared that is a number": (INDEX | {"declared": 3}, "`declared`"),
    "a declared layer that is a text": (INDEX | {"declared": ["n"]}, "`declared/0`"),
    "declared parameters that are numbers": (
        INDEX | {"declared": [INDEX["declared"][0] | {"parameters": [1]}]}, "`declared/0/parameters`"
    ),
    "a collection that is a list": (INDEX | {"collection": []}, "`collection`"),
    "an unknown option": (INDEX | {"collection": {"evil": 1}}, "`collection/evil`"),
    "an option of another type": (INDEX | {"collection": {"samples": "3"}}, "`collection/samples`"),
    "an option out of bounds": (INDEX | {"collection": {"samples": 0}}, "`collection/samples`"),
    "an option that is a list": (INDEX | {"collection": {"fisher": ["mc"]}}, "`collection/fisher`"),
    "woodbury that is a list": (INDEX | {"woodbury": []}, "`woodbury`"),
    "a policy of another type": (INDEX | {"woodbury": {"policy": {}}}, "`woodbury/policy`"),
    "a count that is a text": (INDEX | {"examples": "1"}, "`examples`"),
    "a count that is infinite": (INDEX | {"examples": float("inf")}, "`examples`"),
    "a count below 0": (INDEX | {"passes": -1}, "`passes`"),
    "operations that are a number": (INDEX | {"nondeterministic": 5}, "`nondeterministic`"),
    "a precision that is a list": (INDEX | {"amp": ["off"]}, "`amp`"),
    "a micro batch that is a text": (INDEX | {"micro_batch": "1"}, "`micro_batch`"),
    "a loss scale that is a text": (INDEX | {"loss_scale": "1"}, "`loss_scale`"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_a_value_that_cannot_be_is_refused_with_file_and_place(what: str) -> None:
    index, place = HOSTILE[what]
    with pytest.raises(BrokenFactors) as refused:
        read_factors(store_with(index))
    assert refused.value.message.startswith("`factors/factors.index.json`")
    assert place in refused.value.message
    assert refused.value.pointer == "/factors"


@pytest.mark.parametrize("side", ["activation_covariance", "gradient_covariance"])
def test_a_tensor_that_is_not_the_one_recorded_is_refused_with_its_file(side: str) -> None:
    store = store_with(INDEX)
    tensors = store.load_tensors("factors/0.safetensors")
    # still symmetric, of its shape and finite: nothing but the digest tells
    store.save_tensors("factors/0.safetensors", tensors | {side: tensors[side] + 1e-3}, {})
    with pytest.raises(BrokenFactors, match=rf"`head`: `{side}` of `factors/0\.safetensors` is not what .* records"):
        read_factors(store).load(0)


def test_an_index_from_before_there_were_digests_is_read() -> None:
    old = {side: {"file": "0.safetensors"} for side in ("activation_covariance", "gradient_covariance")}
    assert torch.equal(read_factors(store_with(layer(**old))).load(0).G, G)
