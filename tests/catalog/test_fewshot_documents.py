"""Job documents of few-shot training: what is taken, what is refused by name, and how."""

import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from catalog import DOCUMENT, JobDocument
from catalog.field_errors import complaints

ADAPTER = TypeAdapter(DOCUMENT)
GOOD: dict[str, Any] = {"kind": "fewshot_training", "data": {"source": "strokes"}}
MODEL = {"source": "builtin", "name": "digits_cnn"}
CAPACITY: dict[str, Any] = {
    "kind": "capacity",
    "model": MODEL,
    "data": {"source": "builtin", "name": "digits"},
    "task": {"type": "classification"},
}
SOURCES = "builtin, huggingface, file, upload, synthetic, factory"


def parse(document: Any) -> JobDocument:
    return ADAPTER.validate_json(json.dumps(document), strict=True)


def refusal(document: Any) -> str:
    """The only complaint about a document, its pointer first."""
    with pytest.raises(ValidationError) as caught:
        parse(document)
    (complaint,) = complaints(caught.value.errors(include_url=False), DOCUMENT)
    return f"{complaint.pointer} {complaint.message}"


@pytest.mark.parametrize(
    ("data", "options"),
    [
        ({"source": "strokes"}, {}),
        ({"source": "strokes", "image_size": 512, "channels": 16, "per_class": 10_000, "test_classes": 100_000}, {}),
        ({"source": "strokes", "image_size": 8, "seed": 2**63 - 1}, {"backbone": "ResNet18", "FETI": True}),
        ({"source": "image_splits", "path": "data/CUB"}, {"method": "CTX_softmax", "pool": "flatten"}),
        ({"source": "strokes"}, {"method": "ProFOCT_cosine", "n_way": 2, "k_shot": 1, "use_vic_on_attention": True}),
        ({"source": "strokes"}, {"gradient_accumulation_steps": 10**9, "test_iter": 2, "n_query": 1, "width": 1}),
        ({"source": "strokes"}, {"num_epoch": 2**16, "n_episode": 2**16 - 600}),
        ({"source": "strokes"}, {"optimiser": "SGD", "momentum": 1.0, "weight_decay": 1e6}),
        ({"source": "strokes"}, {"method": "ProFOCT_cosine", "vic": {"alpha": 1e6, "threshold": 1e6}}),
        ({"source": "strokes"}, {"num_epoch": 0, "weights": "w.safetensors", "seed": 2**63 - 1}),
    ],
)
def test_documents_of_both_sources_are_taken(data: dict[str, Any], options: dict[str, Any]) -> None:
    document = parse({**GOOD, "data": data, "fewshot_training": options})
    assert (document.model, document.task) == (None, None)


REFUSED_BESIDE: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": MODEL}, "/model has no part in `fewshot_training`; leave it out"),
    "task": ({"task": {"type": "classification"}}, "/task has no part in `fewshot_training`; leave it out"),
    "no data": ({"data": None}, "/data"),
    "factors": ({"factors": {"job": "job_0123456789abcdefghijklmnop"}}, "/factors"),
    "extends": ({"extends": {"job": "job_0123456789abcdefghijklmnop"}}, "/extends"),
    "shards": ({"shards": 2}, "/shards has no part in `fewshot_training`; leave it out"),
    "world size": ({"world_size": 2}, "/world_size is 2, and `fewshot_training` computes in one process; leave it out"),
    "factors kept": ({"keep": ["factors"]}, "/keep holds `factors`, and `fewshot_training` makes none; leave it out"),
    "directions": ({"keep": ["spectra", "directions"]}, "/keep holds `directions`, and `fewshot_training` makes none"),
    "collection": (
        {"collection": {"batch_size": 3}},
        "/collection has no part in `fewshot_training`, which collects nothing; leave it out",
    ),
    "stabilisation": ({"stabilisation": {"damping": 0.5}}, "/stabilisation has no part in `fewshot_training`"),
    "slices of a collection": (
        {"memory": {"micro_batch": 5}},
        "/memory/micro_batch has no part in `fewshot_training`, which plans its own slices; leave it out",
    ),
    "checkpointing": (
        {"memory": {"activation_checkpointing": "off"}},
        "/memory/activation_checkpointing has no part in",
    ),
    "offload": ({"memory": {"offload": "on"}}, "/memory/offload has no part in `fewshot_training`"),
    "another kind": (
        {"kind": ["fewshot_training", "capacity"], "model": MODEL, "task": {"type": "classification"}},
        "/data is of `source: strokes`, which `capacity` cannot read",
    ),
}


@pytest.mark.parametrize(("beside", "said"), REFUSED_BESIDE.values(), ids=REFUSED_BESIDE)
def test_what_belongs_to_a_collection_is_refused_by_name(beside: dict[str, Any], said: str) -> None:
    assert refusal({**GOOD, **beside}).startswith(said)


@pytest.mark.parametrize("data", [{"source": "strokes"}, {"source": "image_splits", "path": "x"}])
def test_other_analyses_refuse_images_in_classes(data: dict[str, Any]) -> None:
    said = refusal({**CAPACITY, "data": data})
    assert said == f"/data is of `source: {data['source']}`, which `capacity` cannot read; take one of {SOURCES}"


@pytest.mark.parametrize(
    "data",
    [
        {"source": "synthetic", "shape": [3, 28, 28], "examples": 50, "classes": 5},
        {"source": "builtin", "name": "digits"},
        {"source": "file", "path": "x.npz"},
    ],
)
def test_examples_without_classes_to_draw_from_are_refused(data: dict[str, Any]) -> None:
    said = refusal({**GOOD, "data": data})
    assert said == (
        f"/data is of `source: {data['source']}`, which `fewshot_training` cannot read; take one of strokes, "
        "image_splits"
    )


OPTIONS: list[tuple[dict[str, Any], str]] = [
    *(({name: 0}, f"/{name} is 0; take 1 or more") for name in (
        "width", "k_shot", "n_query", "n_episode", "gradient_accumulation_steps")),
    ({"test_iter": 1}, "/test_iter is 1; take 2 or more"),
    ({"backbone": "ResNet18", "width": 32}, "/width is that of Conv nets, and `backbone` is `ResNet18`; leave it out"),
    ({"n_way": 1}, "/n_way is 1; take 2 or more"),
    ({"num_epoch": -1}, "/num_epoch is -1; take a finite number of 0 or more"),
    ({"width": 65_537}, "/width is 65,537; take at most 65,536"),
    *(({name: 10**9 + 1}, f"/{name} is 1,000,000,001; take at most 1,000,000,000") for name in (
        "n_way", "k_shot", "n_query", "n_episode", "num_epoch", "test_iter", "gradient_accumulation_steps")),
    # no float holds these
    *(({name: 10**400}, f"/{name} is 10,000,000,") for name in (
        "num_epoch", "seed", "n_way")),
    ({"seed": -1}, "/seed is -1; take a finite number of 0 or more"),
    ({"seed": 2**63}, "/seed is 9,223,372,036,854,775,808; take at most 9,223,372,036,854,775,807"),
    ({"learning_rate": 0.0}, "/learning_rate is 0.0; take a finite number above 0"),
    ({"learning_rate": -1.0}, "/learning_rate is -1.0; take a finite number above 0"),
    ({"learning_rate": float("inf")}, "/learning_rate is not a finite number; take an ordinary number"),
    ({"learning_rate": float("nan")}, "/learning_rate is not a finite number; take an ordinary number"),
    ({"weight_decay": -0.5}, "/weight_decay is -0.5; take a finite number of 0 or more"),
    ({"momentum": -0.5}, "/momentum is -0.5; take a finite number of 0 or more"),
    ({"momentum": 0.5}, "/momentum is an option of `SGD`, and `optimiser` is `AdamW`; leave it out"),
    ({"method": "fsct_cosine"}, "/method is not a choice here; take 'ProtoNet', 'CTX_softmax', "),
    ({"backbone": "ResNet50"}, "/backbone is not a choice here; take 'Conv4', 'Conv6', 'ResNet18' or 'ResNet34'"),
    ({"FETI": True}, "/FETI is a form of the ResNets, and `backbone` is `Conv4`; leave it out"),
    ({"num_epoch": 0}, "/num_epoch is 0, which tests `weights` alone; give a file of weights, or 1 or more"),
    ({"weights": ""}, "/weights names nothing; give the path of a file or folder"),
    ({"weights": "a\0b"}, "/weights names nothing; give the path of a file or folder"),
    ({"batch_norm": "per_chunk"}, "/batch_norm is `per_chunk`: statistics of each slice give the gradient of another"),
    ({"use_vic_on_attention": True}, "/use_vic_on_attention is an option of `ProFOCT`, and `method` is"),
    ({"vic": {"gamma": 5.0}}, "/vic is an option of `ProFOCT`, and `method` is"),
    ({"method": "ProtoNet", "ctx": "shots"}, "/ctx is an option of `CTX`, and `method` is `ProtoNet`; leave it out"),
    ({"amp_dtype": "bf16", "use_amp": False}, "/amp_dtype is `bf16`, and `use_amp` is false; leave one of them out"),
    ({"vic": {"gamma": -1.0}}, "/vic/gamma is -1.0; take 0 to 1,000,000"),
    # numbers beyond float32, of which the loss would say that the learning rate is too large
    *(({"method": "ProFOCT_cosine", "vic": {name: 1e300}}, f"/vic/{name} is 1e+300; take 0 to 1,000,000") for name in (
        "alpha", "beta", "gamma", "threshold")),
    ({"weight_decay": 1e300}, "/weight_decay is 1e+300; take at most 1,000,000"),
    ({"optimiser": "SGD", "momentum": 1e300}, "/momentum is 1e+300; take at most 1"),
    # the progress of more could not be told
    ({"num_epoch": 10**9, "n_episode": 10**9}, "/num_epoch is 1,000,000,000, which makes 1,000,000,600,000,000,000"),
    ({"num_epoch": 10**9, "n_episode": 3, "test_iter": 2}, "/num_epoch is 1,000,000,000, which makes 5,000,000,000"),
    ({"vic": {"tau": 1.0}}, "/vic/tau is no field here; there are alpha, beta, dynamic, gamma, threshold"),
    ({"optimization": "SGD"}, "/optimization is no field here; it is `fewshot_training.optimiser`"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "said"), OPTIONS, ids=lambda each: str(each)[:40])
def test_an_option_out_of_its_bounds_is_refused(options: dict[str, Any], said: str) -> None:
    assert refusal({**GOOD, "fewshot_training": options}).startswith(f"/fewshot_training{said}")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"image_size": 7}, "/data/image_size is 7; take 8 or more"),
        ({"image_size": 513}, "/data/image_size is 513; at most 512 are drawn"),
        ({"channels": 17}, "/data/channels is 17; at most 16 are drawn"),
        ({"channels": 0}, "/data/channels is 0; take 1 or more"),
        ({"per_class": 10_001}, "/data/per_class is 10,001; at most 10,000 are drawn"),
        ({"train_classes": 100_001}, "/data/train_classes is 100,001; at most 100,000 are drawn"),
        ({"test_classes": 0}, "/data/test_classes is 0; take 1 or more"),
        ({"seed": -1}, "/data/seed is -1; take 0 to 2^63-1"),
        ({"seed": 2**63}, "/data/seed is 9223372036854775808; take 0 to 2^63-1"),
    ],
)
def test_a_size_of_strokes_out_of_its_bounds_is_refused(data: dict[str, Any], said: str) -> None:
    assert refusal({**GOOD, "data": {"source": "strokes", **data}}) == said


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_image_splits_need_a_folder(path: str) -> None:
    said = refusal({**GOOD, "data": {"source": "image_splits", "path": path}})
    assert said == "/data/path names nothing; give the path of a file or folder"
