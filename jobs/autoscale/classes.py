"""Machine classes, the kinds of machine that the autoscaler may start, read from a TOML file (docs/autoscale.md).

A class has a template, the text for a launcher to start one machine. Its double braces are distinct from all that
shells, Slurm and YAML write by themselves.
"""

import shlex
import string
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from catalog.duration import duration_seconds
from catalog.field_errors import suggestion
from catalog.record import FieldError
from catalog.requests.inputs import require_factory
from catalog.requests.memory import amount_bytes
from jobs.devices.registry import DeviceKind
from jobs.errors import ClassesInvalid

LAUNCHERS = ("slurm", "kubernetes", "command")
DEVICES: dict[str, DeviceKind] = {"cuda": "cuda", "cpu": "host", "fake": "fake"}
"""Kinds of device by the words of the file; a fake one is a GPU that `KRONOSCOPE_FAKE_GPUS` makes up."""
PLACEHOLDERS = ("worker", "machine", "class", "devices", "device_bytes", "wall_seconds", "wall_minutes")
_REQUIRED = {
    "worker": "it stands for the command that the machine is to run",
    "machine": "an object's name in the cluster must be new",
}
_SHOWN_CHARACTERS = 30


class Template(string.Template):
    """A text with placeholders in double braces."""

    pattern: ClassVar[Any] = r"""
        \{\{[^\S\n]*(?P<braced>\w+)[^\S\n]*\}\}
        | (?P<invalid> \{\{(?!\{(?!\{)) | \}\} )  # of three braces the outer one stands for itself
        | (?P<named>(?!)) | (?P<escaped>(?!))
    """

    def require(self, *names: str) -> None:
        """Refuse braces that are not a placeholder, unknown placeholders, and a text without those names."""
        for found in self.pattern.finditer(self.template):
            if found["invalid"]:
                number = self.template.count("\n", 0, found.start()) + 1
                text = self.template[found.start() :].splitlines()[0][:_SHOWN_CHARACTERS]
                raise ValueError(
                    f"template line {number} has braces that are no placeholder (got {text!r}); write a name between "
                    "them, such as {{ worker }}"
                )
        present = self.get_identifiers()
        unknown = next((name for name in present if name not in PLACEHOLDERS), None)
        if unknown is not None:
            known = ", ".join(PLACEHOLDERS)
            raise ValueError(f"template has the placeholder {{{{ {unknown} }}}}, which is unknown; take one of {known}")
        for name in names:
            if name not in present:
                raise ValueError(f"template must contain {{{{ {name} }}}}: {_REQUIRED[name]}")


def _reader(read: Callable[[str], object]) -> BeforeValidator:
    """Read a text into a value; where it reads None, or the value is not a text, the field's own rule is said."""

    def value_of(text: object) -> object:
        value = read(text) if isinstance(text, str) else None
        if value is None:
            raise ValueError
        return value

    return BeforeValidator(value_of)


def _plain_words(command: str) -> str:
    """Return a command as words that no shell, and no YAML text in quotes, reads in another way."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"worker is not a command ({error})") from error
    strange = next((word for word in words if shlex.quote(word) != word), None)
    if strange is not None:
        raise ValueError(
            f"worker must be made of plain words (got {strange!r}); put what needs quotes into the template"
        )
    return " ".join(words)


def _factory(name: str) -> str:
    try:
        require_factory("factories", "any:one" if name == "*" else name)
    except FieldError:
        raise ValueError(
            f"factories must be entries such as `package.module:callable`, or `*` (got {name!r})"
        ) from None
    return name


Count = Annotated[int, Field(ge=1, le=100_000, strict=True)]
Seconds = Annotated[float, _reader(duration_seconds)]
Size = Annotated[int, _reader(lambda text: amount_bytes("device_bytes", text, free_bytes=0) or None)]
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]

_RULES = {
    "name": "must be 1 to 32 lower-case letters, digits and dashes",
    "device": f"must be one of {', '.join(DEVICES)}",
    "device_bytes": 'must be a size such as "79GiB"',
    **dict.fromkeys(("devices", "jobs_per_device", "ceiling"), "must be a whole number from 1 on"),
    **dict.fromkeys(
        ("cooldown", "wall", "drain_before"), 'must be a number with its unit (s, m, h or d), such as "10m"'
    ),
    "factories": 'must be a list such as ["package.module:callable"]',
    "scope": "must be a text of 1 to 100 characters",
    **dict.fromkeys(("template", "template_file", "worker", "logs"), "must be a text"),
}
"""For each field of the file what must hold, as it is said where it does not."""


class MachineClass(BaseModel):
    """One kind of machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern="^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")]
    kind: Annotated[DeviceKind, _reader(DEVICES.get)] = Field(validation_alias="device")
    device_bytes: Size
    """Bytes that one job may have of a device."""
    devices: Count = 1
    jobs_per_device: Count = 1
    """Waiting jobs that a device is worth: with more, fewer machines are started, and each works longer."""
    ceiling: Count
    cooldown_seconds: Seconds = Field(60.0, validation_alias="cooldown")
    wall_seconds: Seconds | None = Field(None, validation_alias="wall")
    drain_seconds: Seconds = Field(600.0, validation_alias="drain_before")
    factories: Annotated[
        tuple[Annotated[str, AfterValidator(_factory)], ...],
        BeforeValidator(lambda value, info: info.context[2] if value is None else value),
    ] = Field(None, validate_default=True)
    """The factories that its workers list, by default those that the operator allows; `*` is all."""
    template: str | None = None
    template_file: Text | None = None
    _text: Template = PrivateAttr()

    @model_validator(mode="after")
    def _read_template(self, info: ValidationInfo[tuple[Path, str, object]]) -> Self:
        """Read the template, and refuse what the launcher cannot start."""
        path, launcher, _ = info.context
        wall, drain = self.wall_seconds, self.drain_seconds
        if wall is None and launcher == "slurm":
            raise ValueError('wall is missing; give one such as "4h", which is what Slurm is asked for')
        if wall is not None and wall <= drain + 60:
            raise ValueError(
                f"wall must leave a worker more than a minute before drain_before (got {wall:g} s and {drain:g} s)"
            )
        if (self.template is None) == (self.template_file is None):
            raise ValueError(f"must have either template, the text, or template_file, a file beside {path.name}")
        text = self.template
        if text is None:
            place = path.parent / str(self.template_file)
            try:
                text = place.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"template_file {place} cannot be read ({error})") from error
        self._text = Template(text)
        self._text.require("worker", *(["machine"] if launcher == "kubernetes" else []))
        if launcher == "slurm" and not text.startswith("#!"):
            raise ValueError("template must begin with `#!/bin/bash` or its like: sbatch takes a script")
        return self

    def script(self, machine_id: str, worker: str) -> str:
        """Return the text that starts a machine; its worker ends when idle, or before the machine is taken."""
        wall = int(self.wall_seconds or 0)
        settings = {"MACHINE": machine_id, "UNTIL_IDLE": "1", "SLOTS": str(self.devices)}
        if self.wall_seconds is not None:
            settings |= {"WALL": f"{self.wall_seconds:.0f}s", "DRAIN_BEFORE": f"{self.drain_seconds:.0f}s"}
        return self._text.substitute(
            {"class": self.name},
            worker=f"env {' '.join(f'KRONOSCOPE_{name}={value}' for name, value in settings.items())} {worker}",
            machine=machine_id,
            devices=self.devices,
            device_bytes=self.device_bytes,
            wall_seconds=wall,
            wall_minutes=-(-wall // 60),
        )


class ClassesFile(BaseModel):
    """All classes of one launcher."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    worker: Annotated[Text, AfterValidator(_plain_words)] = "kronoscope worker"
    """The command of a worker."""
    scope: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    """A name for the launcher's queue, where one ledger has several of a kind; None takes the launcher's."""
    logs: Text = ".kronoscope/machines"
    """Folder of the output of machines that the launcher `command` starts."""
    classes: tuple[MachineClass, ...] = Field(validation_alias="class", min_length=1)

    @model_validator(mode="after")
    def _tell_apart(self) -> Self:
        names = [each.name for each in self.classes]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"has two classes of the name {twice!r}; give each its own")
        return self


def read_classes(path: Path, launcher: str, factories: tuple[str, ...] = ()) -> ClassesFile:
    """Read a file of machine classes; those that list no factories have the ones given here."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ClassesInvalid(f"{path} cannot be read ({error.strerror}); name a TOML file with --classes") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ClassesInvalid(f"{path} is not TOML ({error})") from error
    try:
        file = ClassesFile.model_validate(document, context=(path, launcher, factories))
    except ValidationError as error:
        raise ClassesInvalid(_sentence(path, document, error)) from error
    return file.model_copy(update={"logs": str((path.parent / file.logs).absolute())})


def _sentence(path: Path, document: Mapping[str, Any], error: ValidationError) -> str:
    """Say of the first fault where it is, what must hold, and what was found."""
    # a misspelt name comes first: it may be why another field is missing
    first = min(error.errors(include_url=False), key=lambda each: each["type"] != "extra_forbidden")
    model: type[BaseModel] = ClassesFile
    value: Any = document
    at, place = f"{path}:", first["loc"]
    if place == ("class",) or first["type"] == "model_type":
        return f"{path} must have at least one class; write one below a line [[class]]"
    if place[:1] == ("class",):
        model, value, place = MachineClass, document["class"][place[1]], place[2:]
        number = int(first["loc"][1]) + 1
        at += f" class {number if 'name' not in value or place == ('name',) else repr(value['name'])}:"
    cause = first.get("ctx", {}).get("error")
    if type(cause) is ValueError and str(cause):
        return f"{at} {cause}"
    known = [str(field.validation_alias or name) for name, field in model.model_fields.items()]
    field = str(place[0])
    if first["type"] == "extra_forbidden":
        return f"{at} has no field {field!r}; take one of {', '.join(known)}{suggestion(field, known)}"
    if first["type"] == "missing":
        return f"{at} {field} is missing; it {_RULES[field]}"
    return f"{at} {field} {_RULES[field]} (got {value[place[0]]!r})"
