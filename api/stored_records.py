"""Stored records, for the OpenAPI document: metrics, records, summaries, manifests, plans and events.

A response passes such values on as they were stored: they are neither validated nor completed, since rows of an older
version hold fewer fields, and those of a newer one more. So their schemas require nothing and allow further properties.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from catalog import ANALYSES
from catalog.analyses.analysis import RefusedAnalysis
from catalog.frames import AppliedAdapter, Reading
from catalog.record import record
from catalog.responses.layer_record import LayerRecord, Observed
from catalog.responses.reproduction import Reproduction

_SCHEMAS = "#/components/schemas/"
_PREFIX = "Stored"


@record
class Environment:
    """The environment in which an attempt computed."""

    python: str
    """Version of Python."""
    implementation: str
    """Implementation of Python, such as `CPython`."""
    platform: str
    """Operating system with its version."""
    processor: str
    """Name of the CPU."""
    packages: Mapping[str, str]
    """Versions of the packages that numbers depend on, by name."""
    device: str
    """`cpu` or `cuda`."""
    device_name: str | None
    """Name of the GPU; null on a CPU."""
    cuda: str | None
    """Version of CUDA; null on a CPU."""
    threads: int
    """Threads that torch computed with."""
    cpu_capability: str
    """Instruction set that torch used."""


@record
class Manifest:
    """What a job was computed from, and where."""

    environment: Environment
    """The environment of the last attempt."""
    document_sha256: str
    """Digest of the document."""
    artifacts: int
    """Files of the job."""
    fence: int
    """Fencing token of the last attempt."""
    attempt: int
    """The attempt that ended the job."""
    model_sha256: str | None
    """Digest of the model's parameters and buffers; null where factors took the place of a model."""
    data_sha256: str | None
    """Digest of one pass over the data; null where factors took the place of data."""
    examples: int | None
    """Examples of one pass."""
    factors_sha256: str | None
    """Digest of the stored factors that took the place of a model; null where there were none."""
    against_sha256: str | None
    """The same of the factors that a comparison was made with."""
    refused: tuple[RefusedAnalysis, ...]
    """Analyses that were refused while others were done."""
    unused: tuple[str, ...]
    """Fields, columns, files and tensors of the model's folder and the data that were not used."""
    notices: tuple[str, ...]
    """What was read otherwise than it stands there, in a way that changes numbers."""
    imported: bool
    """True for an imported job."""
    reading: Reading
    """How the data were read."""
    adapters: tuple[AppliedAdapter, ...]
    """The adapter that was applied to the model, with its base and digests; empty where there was none."""
    reproduction: Reproduction | None
    """The comparison with the job that `reproduces` of the document names."""


@record
class PlanStage:
    """One stage of a plan."""

    device_bytes: int | None
    """Bytes held at one time on the device."""
    host_bytes: int | None
    """Bytes held at one time in host memory."""
    disk_bytes: int | None
    """Bytes held at one time on the disk."""
    seconds: float | None
    """Estimated seconds; null where the plan has no estimate."""
    seconds_range: tuple[float, ...] | None
    """Lower and upper end of the estimate."""


@record
class PlanRecord:
    """How a job is computed within its memory."""

    device_peak_bytes: int | None
    """Largest sum of bytes on the device, over all stages."""
    host_peak_bytes: int | None
    """Largest sum of bytes in host memory, over all stages."""
    disk_peak_bytes: int | None
    """Largest sum of bytes on the disk, over all stages."""
    stages: Mapping[str, PlanStage]
    """Bytes and seconds by the name of the stage."""
    parts: tuple[tuple[str, ...], ...]
    """Layers of each pass over the data."""
    micro_batch: int | None
    """Examples that go through the model at once; null is the whole batch."""
    offload: bool
    """Whether the sums stand in host memory."""
    activation_checkpointing: bool
    """Whether repeated layers are computed again in the backward pass."""
    self_check_seconds: float | None
    """Seconds that the comparison with single examples takes."""
    why: str
    """The reason for the choice."""
    pace: str
    """`measured` on this machine, `shared` where other programs used its cores meanwhile, or the `usual` one."""
    start_seconds: float | None
    """Seconds from the start of the job's process until the plan was made."""
    seconds: float | None
    """Estimated seconds from the start of the job's process to its last row."""
    seconds_range: tuple[float, ...] | None
    """Lower and upper end of the estimate."""
    threads: int | None
    """Computing threads, which every later attempt keeps."""
    thread_speeds: Mapping[str, float] | None
    """Operations per second of each number of threads that was tried; null where the number was given."""


@record
class EventData:
    """Content of an event; which fields it has depends on `type`."""

    state: str | None
    """The state that the job moved to (`state`), or that the piece's job has (`piece`)."""
    attempt: int | None
    """The attempt that wrote the event."""
    stage: str | None
    """Of `progress`: the stage."""
    done: int | None
    """Of `progress`: finished units of the stage."""
    total: int | None
    """Of `progress`: units of the stage; null while unknown."""
    kind: str | None
    """Of `layer`, `summary` and `digest_differs`: the analysis."""
    ordinal: int | None
    """Of `layer` and `digest_differs`: position of the layer in the model."""
    layer: str | None
    """Of `layer` and `digest_differs`: the layer's name."""
    name: str | None
    """Of `artifact`: the file's name."""
    sha256: str | None
    """Of `layer` and `artifact`: the digest."""
    level: str | None
    """Of `log`: `debug`, `info`, `warning` or `error`."""
    message: str | None
    """Of `log`: the line."""
    environment: Environment | None
    """Of `started`: where the attempt computes."""
    plan: PlanRecord | None
    """Of `plan`: the plan that the attempt follows."""
    round: str | None
    """The round of the divided job (`piece`)."""
    index: int | None
    """The piece's place in its round, from 0 (`piece`)."""
    count: int | None
    """The number of pieces in the round (`piece`)."""
    job: str | None
    """The job that computes the piece (`piece`)."""


def describe_stored_values(schemas: dict[str, Any], document: Mapping[str, Any]) -> None:
    """Give the fields that hold stored JSON their schemas.

    Args:
        schemas: Schemas of the OpenAPI document by name; those of stored values are added.
        document: Schema of the job document with its parts as `$defs`, which refer to each other by
            `#/components/schemas/Stored…`.
    """
    _add(schemas, "JobDocument", document)
    for each in (LayerRecord, Observed, Manifest, PlanRecord, EventData):
        _add(schemas, each.__name__, _schema(each))
    metrics, summaries = {}, {}
    for kind, analysis in ANALYSES.items():
        _add(schemas, analysis.metrics.__name__, _schema(analysis.metrics))
        _add(schemas, analysis.summary.__name__, _schema(analysis.summary))
        metrics[analysis.metrics.__name__] = _reference(analysis.metrics.__name__)
        summaries[kind] = {**_reference(analysis.summary.__name__), "description": f"Summary of `{kind}`."}
    schemas[f"{_PREFIX}Summaries"] = {"type": "object", "properties": summaries, "additionalProperties": True}
    fields = {
        "document": ("JobView", "EstimateView", "ValidationView", "Example"),
        "plan": ("JobView", "EstimateView"),
        "record": ("LayerView",),
        "observed": ("LayerView",),
        "metrics": ("LayerView",),
        "summary": ("ResultsView",),
        "manifest": ("ResultsView",),
        "data": ("EventView",),
    }
    shapes: dict[str, list[dict[str, Any]]] = {
        "document": [_reference("JobDocument")],
        "plan": [_reference("PlanRecord")],
        "record": [_reference("LayerRecord")],
        "observed": [_reference("Observed")],
        "metrics": list(metrics.values()),
        "summary": [_reference("Summaries")],
        "manifest": [_reference("Manifest")],
        "data": [_reference("EventData")],
    }
    for field, views in fields.items():
        for view in views:
            properties = schemas[view]["properties"]
            before = properties[field]
            missing = [each for each in before.get("anyOf", []) if each.get("type") == "null"]
            kept = {name: value for name, value in before.items() if name in ("title", "description")}
            properties[field] = kept | {"anyOf": [*shapes[field], *missing]}


def stored_template() -> str:
    """Return where the schemas of stored values stand, with `{model}` for the name."""
    return _SCHEMAS + _PREFIX + "{model}"


def _schema(record_type: type) -> dict[str, Any]:
    return TypeAdapter(record_type).json_schema(ref_template=stored_template())


def _reference(name: str) -> dict[str, str]:
    return {"$ref": stored_template().format(model=name)}


def _add(schemas: dict[str, Any], name: str, schema: Mapping[str, Any]) -> None:
    parts = {key: value for key, value in schema.items() if key != "$defs"}
    for part, value in {**schema.get("$defs", {}), name: parts}.items():
        # a generator of clients names classes after titles, where two of one name are none
        schemas[_PREFIX + part] = {**_open(value), "title": _PREFIX + part}


def _open(schema: Any) -> Any:  # noqa: ANN401 - any part of a JSON schema
    """Return a schema that requires no property and allows further ones."""
    if isinstance(schema, list):
        return [_open(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    opened = {key: _open(value) for key, value in schema.items() if key != "default"}
    if isinstance(schema.get("properties"), Mapping):
        opened.pop("required", None)
        opened["additionalProperties"] = True
    return opened
