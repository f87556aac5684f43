"""The job document: what is taken, what is refused, and in which words."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from catalog import ANALYSES, DOCUMENT, JobDocument
from catalog.field_errors import complaints, spellings
from catalog.frames import Failed, LayerDone, Progress, decode, encode
from catalog.record import FieldError, canonical_json
from catalog.requests.data_sources import Pixels
from catalog.requests.memory import amount_bytes

ADAPTER = TypeAdapter(DOCUMENT)
GOOD: dict[str, Any] = {
    "kind": "capacity",
    "model": {"source": "builtin", "name": "digits_cnn"},
    "data": {"source": "builtin", "name": "digits"},
    "task": {"type": "classification"},
}

# what an unknown kind is answered: the whole menu, whatever is on it
*FORMER, LAST = (f"'{kind}'" for kind in ANALYSES)
MENU = f"is not a choice here; take {', '.join(FORMER)} or {LAST}"


def parse(document: Any) -> JobDocument:
    return ADAPTER.validate_json(json.dumps(document), strict=True)


def refusals(document: Any) -> list[tuple[str, str]]:
    with pytest.raises(ValidationError) as caught:
        parse(document)
    return [(c.pointer, c.message) for c in complaints(caught.value.errors(include_url=False), DOCUMENT)]


def test_document_of_the_readme_is_taken() -> None:
    document = parse(
        {
            **GOOD,
            "kind": ["factors", "capacity"],
            "collection": {
                "fisher": "mc", "sharing": "expand", "batch_size": 64, "dtype": "float32", "seed": 0, "update_freq": 1,
                "ema_decay": None,
            },
            "stabilisation": {"damping": 1.0e-4, "damping_mode": "relative", "kappa_max": 1.0e6},
            "memory": {"device": "auto", "host": "20GiB"},
            "keep": ["factors", "spectra"],
            "capacity": {"rank_tolerance": 1e-6},
            "labels": {"paper": "icml"},
        }
    )  # fmt: skip
    assert document.kinds == ("factors", "capacity")
    assert parse(json.loads(canonical_json(document))) == document


def test_every_analysis_has_its_block() -> None:
    names = {field.name for field in dataclasses.fields(DOCUMENT)}
    assert {kind for kind, analysis in ANALYSES.items() if analysis.params is not None} <= names


@pytest.mark.parametrize(
    ("change", "pointer", "message"),
    [
        ({"kind": "hessian"}, "/kind", MENU),
        ({"kind": []}, "/kind", "is empty"),
        ({"kind": ["capacity", "capacity"]}, "/kind", "names an analysis twice"),
        ({"model": None}, "/model", "is missing; give `model`"),
        ({"model": {"source": "pickle"}}, "/model/source", "is unknown; take one of 'builtin'"),
        ({"model": {"name": "x"}}, "/model/source", "is missing; take one of"),
        ({"model": {"source": "builtin", "name": "resnet"}}, "/model/name", "is not a choice here"),
        ({"model": {"source": "builtin"}}, "/model/name", "is missing"),
        ({"model": {"source": "builtin", "name": "digits_mlp", "factory": "a:b"}}, "/model/factory", "there are name"),
        ({"model": {"source": "factory", "factory": "a:b", "kwargs": []}}, "/model/kwargs", "must be an object"),
        ({"model": {"source": "factory", "factory": 3}}, "/model/factory", "must be a string"),
        ({"model": {"source": "factory", "factory": "a:b", "kwarg": {}}}, "/model/kwarg", "did you mean `kwargs`?"),
        ({"collection": {"batch_size": -1}}, "/collection/batch_size", "is -1; take 1 to 65536"),
        ({"collection": {"batch_size": 2**40}}, "/collection/batch_size", "take 1 to 65536"),
        ({"collection": {"batch_size": "12"}}, "/collection/batch_size", "must be an integer"),
        ({"collection": {"batch_size": 3.0}}, "/collection/batch_size", "must be an integer"),
        ({"collection": {"batch_size": True}}, "/collection/batch_size", "must be an integer"),
        ({"collection": {"seed": -1}}, "/collection/seed", "is -1"),
        ({"collection": {"dtype": "float8"}}, "/collection/dtype", "is not a choice here"),
        ({"collection": {"ema_decay": 1.0}}, "/collection/ema_decay", "between 0 and 1"),
        ({"collection": {"fisher": "type2", "samples": 4}}, "/collection/samples", "only `mc` samples"),
        ({"collection": {"batchsize": 3}}, "/collection/batchsize", "did you mean `batch_size`?"),
        ({"stabilisation": {"damping": 0}}, "/stabilisation/damping", "take a positive number"),
        ({"stabilisation": {"damping": -1}}, "/stabilisation/damping", "take a positive number"),
        ({"stabilisation": {"damping": 1e308}}, "/stabilisation/damping", "take a positive number"),
        (
            {"kind": "reconstruction", "stabilisation": {"kappa_max": None}},
            "/stabilisation/kappa_max",
            "is null, and `reconstruction` clips at it",
        ),
        ({"spectrum": {"of": "kfc"}, "kind": "spectrum"}, "/spectrum/of", "kfac"),
        ({"spectrum": {"of": []}, "kind": "spectrum"}, "/spectrum/of", "is empty"),
        ({"spectrum": {"of": ["ggn", "ggn"]}, "kind": "spectrum"}, "/spectrum/of", "names a curvature twice"),
        ({"spectrum": {"of": "ggn", "probes": 1}, "kind": "spectrum"}, "/spectrum/probes", "no band can be told"),
        (
            {"spectrum": {"of": ["kfac", "ekfac"]}, "kind": "spectrum"},
            "/collection/ekfac",
            "is false, and `spectrum.of: ekfac` needs it: give `ekfac: true`",
        ),
        (
            {
                "kind": "spectrum",
                "spectrum": {"of": ["ggn", "hessian"]},
                "task": {"type": "sentence_embedding"},
            },
            "/spectrum/of",
            "holds `hessian`, and `sentence_embedding` has no targets",
        ),
        (
            {
                "kind": "spectrum",
                "spectrum": {"of": ["kfac", "hessian"]},
                "factors": {"job": "x"},
                "model": None,
                "data": None,
                "task": None,
            },
            "/factors",
            "hold no model, and `spectrum.of: hessian` needs it",
        ),
        (
            {
                "kind": "spectrum",
                "spectrum": {"of": "ggn"},
                "collection": {"fisher": "empirical"},
                "task": {"type": "classification", "loss": "model"},
            },
            "/task",
            "has no known Hessian, and `spectrum.of: ggn` needs it",
        ),
        ({"damping": 1e-3}, "/damping", "it is `stabilisation.damping`"),
        ({"max_condition_number": 1e6}, "/max_condition_number", "it is `stabilisation.kappa_max`"),
        ({"kfac_use_woodbury": True}, "/kfac_use_woodbury", "it is `woodbury.policy` (true is `all`"),
        ({"use_eigenvalue_correction": True}, "/use_eigenvalue_correction", "it is `stabilisation.kappa_max` (false"),
        ({"gradient_accumulation_steps": 4}, "/gradient_accumulation_steps", "it is `memory.micro_batch` (examples"),
        ({"collection": {"gradient_accumulation_steps": 4}}, "/collection/gradient_accumulation_steps", "`memory.mi"),
        ({"memory": {"host": "20 parsecs"}}, "/memory/host", "is not a size"),
        ({"memory": {"device": 2.5}}, "/memory/device", "a fraction in (0, 1]"),
        (
            {"model": {"source": "factory", "factory": "os.system(x)"}},
            "/model/factory",
            "write `package.module:callable`",
        ),
        ({"model": {"source": "directory", "path": ""}}, "/model/path", "names nothing"),
        ({"data": {"source": "file", "path": ""}}, "/data/path", "names nothing"),
        ({"task": {"type": "regression", "loss": "cross_entropy"}}, "/task/loss", "needs classes"),
        ({"task": {"type": "causal_lm", "loss": "bce"}}, "/task/loss", "does not fit `causal_lm`"),
        ({"task": {"type": "classification", "loss": "model"}}, "/task", "`collection.fisher: empirical`"),
        ({"data": {"source": "synthetic", "shape": [4], "examples": 0}}, "/data/examples", "take 1 or more"),
        ({"data": {"source": "synthetic", "shape": [4], "examples": 1, "seed": -1}}, "/data/seed", "take 0 to 2^63-1"),
        # beyond 2^63 another seed stood for it, where no service read the document
        ({"data": {"source": "synthetic", "shape": [4], "examples": 1, "seed": 2**63}}, "/data/seed", "0 to 2^63-1"),
        ({"data": {"source": "synthetic", "shape": [2**20, 2**20], "examples": 1}}, "/data/shape", "at most"),
        ({"factors": {"job": "x"}}, "/model", "contradicts `factors`"),
        ({"factors": {}}, "/factors/job", "give either `job` or `path`"),
        ({"factors": {"path": ""}}, "/factors/path", "names nothing"),
        ({"kind": "compare_curvature"}, "/compare_curvature/against", "is missing; name the second set of factors"),
        ({"compare_curvature": {"against": {}}}, "/compare_curvature/against/job", "give either `job` or `path`"),
        ({"compare_curvature": {"against": {"path": ""}}}, "/compare_curvature/against/path", "names nothing"),
        (
            {"compare_curvature": {"against": {"path": "a", "tensor": "b"}}},
            "/compare_curvature/against/tensor",
            "it is `factors.tensor`",
        ),
        ({"compare_curvature": {"k": [1, 1001]}}, "/compare_curvature/k", "holds 1001; take numbers from 1 to 1000"),
        ({"compare_curvature": {"k": [0]}}, "/compare_curvature/k", "holds 0; take numbers from 1 to 1000"),
        ({"compare_curvature": {"k": [5, 1]}}, "/compare_curvature/k", "is [5, 1]; list each number once"),
        ({"compare_curvature": {"k": [5, 5]}}, "/compare_curvature/k", "is [5, 5]; list each number once"),
        ({"compare_curvature": {"k": []}}, "/compare_curvature/k", "is empty"),
        ({"labels": {"<b>": "x"}}, "/labels", "take names of A-Z, a-z, 0-9 and ._/-"),
        ({"labels": {"é": "x"}}, "/labels", "take names of A-Z, a-z, 0-9 and ._/-"),
        ({"keep": ["everything"]}, "/keep/0", "is not a choice here"),
    ],
)
def test_bad_documents_name_the_field_and_the_remedy(change: dict[str, Any], pointer: str, message: str) -> None:
    said = refusals({**GOOD, **change})
    assert any(found == pointer and message in text for found, text in said), said


@pytest.mark.parametrize("factory", ["nothing", "a b:c", "os:system('x')", ":f", "a.:f", "a:f.g", "ä:f"])
def test_factories_are_named_in_one_way(factory: str) -> None:
    for part in ("model", "data"):
        said = refusals({**GOOD, part: {"source": "factory", "factory": factory}})
        assert said == [(f"/{part}/factory", "is no factory; write `package.module:callable`")]


def test_only_the_meant_branch_of_a_union_is_blamed() -> None:
    assert refusals({**GOOD, "kind": "hessian"}) == [("/kind", MENU)]
    assert [pointer for pointer, _ in refusals({**GOOD, "kind": ["capacity", "hessian"]})] == ["/kind/1"]
    assert refusals({**GOOD, "memory": {"host": True}}) != []


def test_many_unknown_keys_are_answered_shortly() -> None:
    assert len(refusals({**GOOD, **{f"k{n}": 1 for n in range(200)}})) == 20


def test_old_spellings_point_to_fields_that_exist() -> None:
    for place in spellings(DOCUMENT).values():
        value: Any = parse(GOOD)
        steps = place.place.split(".")
        if steps[0] in ("model", "data", "factors", "task", "series"):
            continue
        for step in steps:
            value = getattr(value, step)


def test_amounts() -> None:
    assert amount_bytes("host", "20GiB", 0) == 20 * 2**30
    assert amount_bytes("host", "2TB", 0) == 2 * 10**12
    # a kernel counts limits in 63 bits
    assert amount_bytes("host", "999999999999999TiB", 0) < 2**63
    assert amount_bytes("host", "1.5 MB", 0) == 1_500_000
    assert amount_bytes("host", 0.5, 1000) == 500
    assert amount_bytes("host", "auto", 1000) == 900
    for bad in ("", "GiB", "-3GiB", "1e3", "0MiB"):
        with pytest.raises(FieldError):
            amount_bytes("host", bad, 1)


def test_frames_cross_the_pipe_unchanged() -> None:
    frames = (
        Progress(stage="collection", done=3, total=None, unit="batches"),
        LayerDone(kind="capacity", ordinal=0, layer="a\n\u2028<b>", outcome={"x": 1.5e-300}, observed={}),
        Failed(category="usage", code="x", message="m", pointer="/data", layer=None, detail=None),
    )
    for frame in frames:
        line = encode(frame)
        assert line.count(b"\n") == 1
        assert decode(line) == frame
    with pytest.raises(ValueError, match="JSON compliant"):
        encode(LayerDone(kind="capacity", ordinal=0, layer="a", outcome={"x": float("nan")}, observed={}))
    for garbage in (b"{}", b"[]", b'{"frame": "progress"}', b'{"frame": "nothing"}', b"\xff"):
        with pytest.raises(ValueError):  # noqa: PT011 - any ValueError, JSON's own included
            decode(garbage)


@pytest.mark.parametrize(
    ("fields", "pointer", "said"),
    [
        ({"adapter": ""}, "/model/adapter", "names nothing"),
        ({"adapter_merged": True}, "/model/adapter_merged", "name one in `adapter`"),
        ({"adapter_revision": "main"}, "/model/adapter_revision", "an adapter of the hub"),
        ({"adapter": "./tuned", "adapter_revision": "main"}, "/model/adapter_revision", "an adapter of the hub"),
    ],
)
@pytest.mark.parametrize("source", [{"source": "directory", "path": "m"}, {"source": "huggingface", "id": "a/b"}])
def test_settings_of_an_adapter_need_one(
    source: dict[str, str], fields: dict[str, Any], pointer: str, said: str
) -> None:
    ((where, message),) = refusals({**GOOD, "model": source | fields})
    assert where == pointer
    assert said in message
    parse({**GOOD, "model": source | {"adapter": "owner/tuned", "adapter_revision": "main", "adapter_merged": True}})


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("scale", {"scale": 1e-300}),
        ("scale", {"scale": 1e300}),
        ("deviation", {"scale": 1 / 255, "deviation": (1.0, 1e300)}),
        ("deviation", {"scale": 1 / 255, "deviation": (1e-60,)}),
        ("mean", {"scale": 1 / 255, "mean": (1e60,)}),
        # neighbours of 10^6 in float32 are 1/16 apart, pixels 1/255
        ("mean", {"scale": 1 / 255, "mean": (0.5, 1e6, 0.5)}),
        (None, {"scale": 1, "mean": (123.675, 116.28, 103.53), "deviation": (58.395, 57.12, 57.375)}),
        (None, {"scale": 1 / 255, "mean": (0.485, 0.456, 0.406), "deviation": (0.229,)}),
        (None, {"scale": 1 / 127.5, "mean": (1.0,)}),
        (None, {"scale": 1e-30, "deviation": (1e-20,)}),
    ],
)
def test_pixels_stay_256_numbers_of_float32(field: str | None, given: dict[str, Any]) -> None:
    """Torch's own arithmetic decides which numbers merge pixels."""
    images = torch.arange(256, dtype=torch.uint8).float()
    mean, deviation = (
        torch.tensor(given.get(name, (default,))) for name, default in (("mean", 0.0), ("deviation", 1.0))
    )
    scaled = (images[:, None] * given["scale"] - mean) / deviation
    distinct = all(len(channel.unique()) == 256 and channel.isfinite().all() for channel in scaled.T)
    assert distinct == (field is None)
    if field is None:
        Pixels(**given)
    else:
        with pytest.raises(FieldError, match="pixels from 0 to 255 are not 256 numbers of float32; take the") as caught:
            Pixels(**given)
        assert caught.value.field == field
