"""Options of `kronoscope.local`: every word, name, type and number is checked before a batch is read."""

import dataclasses
import re
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from catalog import ANALYSES
from catalog.requests.collection import Collection, Stabilisation
from catalog.requests.inputs import Task
from catalog.requests.memory import Memory
from catalog.requests.woodbury import Woodbury
from engine.errors import EngineError
from kronoscope.local import load_factors, load_stabilised, measure, operator

BLOCKS = {"collection": Collection, "stabilisation": Stabilisation, "woodbury": Woodbury, "memory": Memory}
PARAMS = {kind: analysis.params for kind, analysis in ANALYSES.items() if analysis.params is not None}


def unread() -> Iterator[Any]:
    raise AssertionError("the data were read")


def refused(**changes: Any) -> str:
    """Measure with changed arguments; return the one sentence that it is refused with, before data are read."""
    with pytest.raises(ValueError, match="`") as caught:
        measure(**{"model": nn.Linear(3, 2), "batches": unread, "task": "classification"} | changes)
    assert isinstance(caught.value, EngineError)
    return str(caught.value)


def placed(name: str, value: Any) -> dict[str, Any]:
    """Arguments of `measure` with one field: `block.field` or `kind.field`."""
    block, field = name.split(".")
    if block in PARAMS:
        return {"kinds": [block], "params": {block: {field: value}}}
    return {block: {field: value} | ({"type": "classification"} if block == "task" and field != "type" else {})}


def fields() -> Iterator[tuple[str, Any]]:
    for block, record in {**BLOCKS, "task": Task, **PARAMS}.items():
        hints = get_type_hints(record)
        for field in dataclasses.fields(record):
            yield f"{block}.{field.name}", hints[field.name]


def members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


WORDS = [(name, hint) for name, hint in fields() if any(get_origin(each) is Literal for each in members(hint))]


def test_there_are_words_to_check() -> None:
    assert len(WORDS) > 20


@pytest.mark.parametrize(("name", "hint"), WORDS, ids=[name for name, _ in WORDS])
def test_a_word_that_is_none_is_refused_with_the_nearest(name: str, hint: Any) -> None:
    word = next(get_args(each)[0] for each in members(hint) if get_origin(each) is Literal)
    said = refused(**placed(name, f"{word}q"))
    assert re.match(r"`(params\['\w+'\]\.)?[\w.]+` must be one of ", said)
    assert name.split(".")[1] in said
    assert f"(got '{word}q')" in said
    assert f"did you mean `{word}`?" in said


@pytest.mark.parametrize("name", [name for name, _ in fields()])
def test_a_value_of_no_type_and_a_misspelt_name_are_refused(name: str) -> None:
    block, field = name.split(".")
    assert re.search(rf"\b{field}\b.*(must be|is object)", refused(**placed(name, object())))
    assert f"has no field `{field}x`; did you mean `{field}`?" in refused(**placed(f"{name}x", 1))
    if block in PARAMS:
        said = refused(kinds=["factors"], params={block: {field: object()}})
        assert field in said, "options of an analysis that is not asked for are looked at, too"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"collection": {"batch_size": True}}, r"`collection.batch_size` must be a whole number \(got True\)"),
        ({"collection": {"batch_size": 2.5}}, r"must be a whole number \(got 2.5\)"),
        ({"collection": {"ekfac": 1}}, r"`collection.ekfac` must be True or False \(got 1\)"),
        ({"collection": {"dtype": torch.float64}}, r"`collection.dtype` must be one of float32, float64 \(got dtype\)"),
        ({"collection": Collection(fisher="foo")}, r"`collection.fisher` must be one of mc, .*\(got 'foo'\)"),
        ({"collection": {"ema": 0.9}}, "has no field `ema`; it is `ema_decay` here"),
        ({"stabilisation": {"damping": float("nan")}}, r"`stabilisation.damping` must be a finite number \(got nan\)"),
        ({"stabilisation": {"damping": "1e-4"}}, r"must be a number \(got '1e-4'\)"),
        ({"stabilisation": {"damping": 10**400}}, "must be a finite number"),
        ({"stabilisation": {"damping": -1}}, "`stabilisation.damping` is -1.0; take a positive number"),
        ({"stabilisation": Stabilisation(damping_mode="abs")}, "did you mean `absolute`"),
        ({"woodbury": {"policy": "hybird"}}, "did you mean `hybrid`"),
        ({"memory": {"device": True}}, "`memory.device` must be a string, or a number"),
        ({"task": object()}, "`task` is object; name what the outputs mean: take one of class"),
        (
            {"task": nn.CrossEntropyLoss(reduction="sum")},
            "`task` is CrossEntropyLoss with reduction='sum': .* of the mean",
        ),
        (
            {"task": nn.BCEWithLogitsLoss(weight=torch.ones(2))},
            "`task` is BCEWithLogitsLoss with `weight`, .* `pos_weight`",
        ),
        ({"task": nn.NLLLoss()}, "`task` is NLLLoss, which is not exactly a task; .*torch.nn.CrossEntropyLoss"),
        ({"task": nn.L1Loss()}, "`task` is L1Loss, which is not exactly a task; take CrossEntropyLoss, "),
        ({"task": nn.CrossEntropyLoss}, "`task` is the class CrossEntropyLoss"),
        ({"task": "clasification"}, "did you mean `classification`"),
        ({"task": {"loss": "mse"}}, "`task.type` is missing; give one of classification"),
        ({"task": {"type": "regression", "loss": "mae"}}, r"must be one of cross_entropy.* \(got 'mae'\)"),
        ({"task": Task(type="nothing")}, r"`task.type` must be one of"),
        ({"kinds": "capcity"}, r"`kinds` holds 'capcity'; give one, or a list, of .*did you mean `capacity`\?"),
        ({"kinds": ["capcity"]}, "did you mean `capacity`"),
        ({"kinds": ["factors", "factors"]}, "names an analysis twice"),
        ({"kinds": []}, "`kinds` is empty"),
        ({"kinds": 3}, "`kinds` is 3; give one, or a list"),
        ({"kinds": torch.tensor(3.0)}, r"`kinds` is tensor\(3.\); give one, or a list"),
        *(
            ({"batches": value}, rf"`batches` is {name}; give a list of \(inputs, targets\), one such pair, a Dataset")
            for value, name in ((None, "NoneType"), (3, "int"), (object(), "object"), (torch.tensor(3.0), "Tensor"))
        ),
        ({"batches": lambda: 3}, r"`batches\(\)` is int; give a list"),
        ({"batches": lambda x: x}, r"`batches` takes other arguments \(missing .* 'x'\); give a function without"),
        ({"kinds": ["influence"], "query": 3}, "`query` is int; give a list"),
        ({"report": lambda stage: None}, r"`report` takes other arguments .*; give a function of \(stage, done, total"),
        ({"kinds": ["spectrum"], "params": {"spectrum": {"of": ["gnn"]}}}, r"of\[0\]` must be one of .* `ggn`\?"),
        ({"kinds": ["spectrum"], "params": {"spectrum": {"of": "gnn"}}}, "did you mean `ggn`"),
        ({"kinds": ["spectrum"], "params": {"spectrum": {"k": 0}}}, r"`params\['spectrum'\].k` is 0; take 1 to"),
        ({"kinds": ["natural_gradient"], "params": {"natural_gradient": {"damping": "fctored"}}}, "`factored`"),
        ({"params": {"capacity": {"metrics": ["trase"]}}}, "did you mean `trace`"),
        ({"params": {"capacity": {"metrics": "trace"}}}, "must be a list, each a string, or None"),
        ({"params": {"capcity": {}}}, r"`params` has options of 'capcity'; .* did you mean `capacity`\?"),
        ({"params": {"factors": {"k": 1}}}, "`params` has options of 'factors'"),
        ({"params": 3}, "`params` is int; give a mapping"),
        ({"report": "stdout"}, "`report` is str; give a function"),
        # what two blocks require of each other
        ({"kinds": ["reconstruction"], "stabilisation": {"kappa_max": None}}, "`stabilisation.kappa_max` is null"),
        ({"task": {"type": "regression", "loss": "model"}}, "`task` `loss: model` has no known likelihood"),
        ({"kinds": ["natural_gradient"], "params": {"natural_gradient": {"of": "ekfac"}}}, "`collection.ekfac: true`"),
        ({"kinds": ["spectrum"], "params": {"spectrum": {"of": "ekfac"}}}, "`collection.ekfac` is false"),
        ({"kinds": ["compare_curvature"]}, "against` is missing"),
        (
            {"kinds": ["natural_gradient"], "params": {"natural_gradient": {"gradient": {"path": "/none"}}}},
            "which cannot be read",
        ),
    ],
)
def test_an_option_that_cannot_be_is_refused_before_data_are_read(changes: dict[str, Any], said: str) -> None:
    assert re.search(said, refused(**changes))


def test_what_fits_is_taken() -> None:
    inputs, targets = torch.randn(6, 3), torch.arange(6) % 2
    found = measure(
        nn.Linear(3, 2),
        (inputs, targets),
        task=Task(type="classification"),
        kinds=["factors", "spectrum"],
        collection={"batch_size": torch.ones(3).numel(), "ema_decay": None, "samples": 1},
        stabilisation={"damping": 1, "kappa_max": 10**6},
        memory={"host": 0.5},
        params={"spectrum": {"of": ["kfac"], "k": 1}},
    )
    assert found.summary["spectrum"].curvatures[0].of == "kfac"
    with pytest.raises(ValueError, match=r"`kind` must be one of factors, spectrum \(got 'spectrm'\); did you mean"):
        found.of("spectrm")
    with pytest.raises(KeyError, match=r"no layer 'heed' has factors; there are '\(model\)'"):
        found.factors["heed"]
    name: Any
    for name in ([], {}, None):
        with pytest.raises(ValueError, match="`kind` must be one of factors, spectrum"):
            found.of(name)
        for layers in (found.factors, found.of("factors")):
            with pytest.raises(KeyError, match=r"no layer .* there are '\(model\)'"):
                layers[name]
            assert name not in [*layers]


def test_a_gradient_in_a_file_is_the_one_that_is_taken(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    given = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    save_file(given, tmp_path / "g.safetensors")
    found = measure(
        model,
        (torch.randn(6, 3), torch.arange(6) % 2),
        task="classification",
        kinds=["natural_gradient"],
        params={"natural_gradient": {"gradient": {"path": str(tmp_path / "g.safetensors")}}},
    )
    norm = torch.cat([each.flatten() for each in given.values()]).double().norm()
    assert found.summary["natural_gradient"].gradient_norm == pytest.approx(float(norm), rel=1e-6)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"of": "ekfca"}, "did you mean `ekfac`"),
        ({"damping": "fctored"}, "did you mean `factored`"),
        ({"uncovered": "refuze"}, "did you mean `refuse`"),
        ({"stabilisation": {"damping_mode": "abs"}}, "`stabilisation.damping_mode` must be one of .* `absolute`"),
        ({"layers": "0"}, r"`layers` must be a list, each a string, or None \(got '0'\)"),
        ({"resident_bytes": True}, "`resident_bytes` must be a whole number"),
        ({"resident_bytes": 1.5}, "`resident_bytes` must be a whole number"),
        ({"device": 3}, "`device` must be a string, or device"),
        ({"device": "cudo"}, "`device` must be one that this machine's PyTorch has"),
        ({"dampng": "exact"}, "did you mean `damping`"),
    ],
)
def test_choices_of_an_operator_are_checked(choice: dict[str, Any], said: str) -> None:
    found = measure(nn.Linear(3, 2), (torch.randn(6, 3), torch.arange(6) % 2), task="classification", kinds=["factors"])
    with pytest.raises(ValueError, match=said) as caught:
        operator(found, **choice)  # type: ignore[arg-type] # that is the point
    assert isinstance(caught.value, EngineError)


def test_numbers_and_paths_given_to_factors_are_checked() -> None:
    found = measure(nn.Linear(3, 2), (torch.randn(6, 3), torch.arange(6) % 2), task="classification", kinds=["factors"])
    gradient = torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"`damping_A` must be a finite number \(got nan\)"):
        found.factors["(model)"].precondition(gradient, damping_A=float("nan"), damping_G=1.0)
    with pytest.raises(ValueError, match=r"`damping_G` must be a number \(got '1'\)"):
        found.factors["(model)"].precondition(gradient, damping_A=1.0, damping_G="1")  # type: ignore[arg-type] # the point
    with pytest.raises(EngineError, match=r"the power must be a finite number \(got 'half'\)"):
        operator(found).power("half")  # type: ignore[arg-type] # the point
    with pytest.raises(ValueError, match="`source` is int; give a folder's path"):
        operator(3)  # type: ignore[arg-type] # the point
    for read in (load_factors, load_stabilised):
        with pytest.raises(ValueError, match="`path` is int; give the path of a folder"):
            read(3)  # type: ignore[operator] # the point


@pytest.mark.parametrize("device", [None, 1.5, True, [], 2**70])
def test_a_device_that_is_none_is_refused(device: Any) -> None:
    with pytest.raises(TypeError, match="`device` must be a string, or device") as caught:
        load_stabilised("/none", device)
    assert isinstance(caught.value, EngineError)


@pytest.mark.parametrize("verify", ["foo", [], object(), 1])
def test_verify_is_true_or_false(verify: Any) -> None:
    with pytest.raises(TypeError, match="`verify` must be True or False") as caught:
        load_factors("/none", verify=verify)
    assert isinstance(caught.value, EngineError)
