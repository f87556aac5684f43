"""Machine classes, the kinds of machine that the autoscaler may start, read from a TOML file.

::

    worker = "kronoscope worker"    # the command of a worker; `python -P -m worker.embedded` needs no Redis

    [[class]]
    name = "a100"
    device = "cuda"                 # cuda, cpu or fake
    device_bytes = "79GiB"          # what one job may have
    devices = 4                     # of one machine; each takes one job, which may also have several
    ceiling = 8                     # machines of this class at a time
    cooldown = "2m"                 # no second start of this class within it
    wall = "12h"                    # for how long a machine is lent
    drain_before = "10m"            # how long before that its jobs are handed back
    template_file = "a100.sbatch"   # or `template`, the text itself

A job goes to the first class of the file that can take it.

A template is the text for a launcher to start one machine. Its double braces are distinct from all that shells,
Slurm and YAML write by themselves. The placeholders are

::

    worker         the command of the worker, with its settings: one line of words that no shell changes (required)
    machine        the machine's id, which is new for each
    class          the name of the machine's class
    devices        devices of the machine
    device_bytes   what one job may have of a device, in bytes
    wall_seconds   for how long the machine is lent; so does wall_minutes, rounded up
"""

import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from catalog.duration import duration_seconds
from catalog.field_errors import suggestion
from catalog.record import FieldError, record
from catalog.requests.inputs import require_factory
from catalog.requests.memory import amount_bytes
from jobs.autoscale.errors import ClassesInvalid
from jobs.devices.registry import DeviceKind

PLACEHOLDERS = ("worker", "machine", "class", "devices", "device_bytes", "wall_seconds", "wall_minutes")

_PLACEHOLDER = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_SHOWN_CHARACTERS = 30


class Template:
    """A text with placeholders, checked when it is read."""

    def __init__(self, field: str, text: str) -> None:
        """Check the placeholders."""
        self._field = field
        self.text = text
        for number, line in enumerate(text.splitlines(), 1):
            rest = _PLACEHOLDER.sub("", line)
            if "{{" in rest or "}}" in rest:
                start = max(rest.find("{{"), rest.find("}}"))
                raise ClassesInvalid(
                    f"{field} line {number} has braces that are no placeholder "
                    f"(got {rest[start : start + _SHOWN_CHARACTERS]!r}); write a name between them, "
                    "such as {{ worker }}"
                )
        self.names = frozenset(_PLACEHOLDER.findall(text))
        unknown = sorted(self.names.difference(PLACEHOLDERS))
        if unknown:
            raise ClassesInvalid(
                f"{field} has the placeholder {{{{ {unknown[0]} }}}}, which is unknown; "
                f"take one of {', '.join(PLACEHOLDERS)}"
            )
        self.require("worker", "it stands for the command that the machine is to run")

    def require(self, name: str, why: str) -> None:
        """Refuse a text without a placeholder."""
        if name not in self.names:
            raise ClassesInvalid(f"{self._field} must contain {{{{ {name} }}}}: {why}")

    def render(self, values: Mapping[str, str]) -> str:
        """Return the text with the values in the places of the placeholders."""
        return _PLACEHOLDER.sub(lambda match: values[match[1]], self.text)


DEVICES: dict[str, DeviceKind] = {"cuda": "cuda", "cpu": "host", "fake": "fake"}
"""Kinds of device by the words of the file; a fake one is a GPU that `KRONOSCOPE_FAKE_GPUS` makes up."""
LAUNCHERS = ("slurm", "kubernetes", "command")

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
_MOST = 100_000
_FILE_FIELDS = ("worker", "scope", "logs", "class")
_CLASS_FIELDS = (
    "name", "device", "device_bytes", "devices", "jobs_per_device", "ceiling", "cooldown", "wall", "drain_before",
    "factories", "template", "template_file",
)  # fmt: skip


@record
class MachineClass:
    """One kind of machine."""

    name: str
    kind: DeviceKind
    device_bytes: int
    """Bytes that one job may have of a device."""
    devices: int
    jobs_per_device: int
    """Waiting jobs that a device is worth: with more, fewer machines are started, and each works longer."""
    ceiling: int
    cooldown_seconds: float
    wall_seconds: float | None
    drain_seconds: float
    factories: tuple[str, ...]
    """The factories that its workers list; `*` is all."""
    template: Template
    worker: str

    def script(self, machine_id: str) -> str:
        """Return the text that starts one machine."""
        wall = 0.0 if self.wall_seconds is None else self.wall_seconds
        return self.template.render(
            {
                "worker": self._command(machine_id),
                "machine": machine_id,
                "class": self.name,
                "devices": str(self.devices),
                "device_bytes": str(self.device_bytes),
                "wall_seconds": str(int(wall)),
                "wall_minutes": str(-(-int(wall) // 60)),
            }
        )

    def _command(self, machine_id: str) -> str:
        """The command of a worker that ends when there is nothing to do, and in time before its machine is taken."""
        settings = {
            "KRONOSCOPE_MACHINE": machine_id,
            "KRONOSCOPE_UNTIL_IDLE": "1",
            "KRONOSCOPE_SLOTS": str(self.devices),
        }
        if self.wall_seconds is not None:
            settings["KRONOSCOPE_WALL"] = f"{self.wall_seconds:.0f}s"
            settings["KRONOSCOPE_DRAIN_BEFORE"] = f"{self.drain_seconds:.0f}s"
        return f"env {' '.join(f'{name}={value}' for name, value in settings.items())} {self.worker}"


@record
class ClassesFile:
    """All classes of one launcher."""

    classes: tuple[MachineClass, ...]
    scope: str | None
    """A name for the launcher's queue, where one ledger has several of a kind; None takes the launcher's."""
    logs: Path
    """Folder of the output of machines that the launcher `command` starts."""


def read_classes(path: Path, launcher: str, factories: tuple[str, ...] = ()) -> ClassesFile:
    """Read a file of machine classes."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ClassesInvalid(f"{path} cannot be read ({error.strerror}); name a TOML file with --classes") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ClassesInvalid(f"{path} is not TOML ({error})") from error
    _require_known(str(path), document, _FILE_FIELDS)
    tables = document.get("class")
    if not isinstance(tables, list) or not tables or not all(isinstance(each, dict) for each in tables):
        raise ClassesInvalid(f"{path} must have at least one class; write one below a line [[class]]")
    defaults = {"worker": _text(str(path), document, "worker", "kronoscope worker"), "factories": list(factories)}
    classes = tuple(_class(path, number, table, defaults, launcher) for number, table in enumerate(tables, 1))
    names = [each.name for each in classes]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ClassesInvalid(f"{path} has two classes of the name {twice[0]!r}; give each its own")
    scope = document.get("scope")
    if scope is not None and (not isinstance(scope, str) or not 0 < len(scope) <= 100):
        raise ClassesInvalid(f"{path}: scope must be a text of 1 to 100 characters (got {scope!r})")
    logs = path.parent / _text(str(path), document, "logs", ".kronoscope/machines")
    return ClassesFile(classes=classes, scope=scope, logs=logs.absolute())


def _class(
    path: Path, number: int, table: Mapping[str, Any], defaults: Mapping[str, Any], launcher: str
) -> MachineClass:
    name = table.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ClassesInvalid(
            f"{path}: class {number}: name must be 1 to 32 lower-case letters, digits and dashes (got {name!r})"
        )
    at = f"{path}: class {name!r}:"
    _require_known(at, table, _CLASS_FIELDS)
    device = table.get("device")
    if not isinstance(device, str) or device not in DEVICES:
        raise ClassesInvalid(f"{at} device must be one of {', '.join(DEVICES)} (got {device!r})")
    wall = _seconds(at, table, "wall", None)
    drain = _seconds(at, table, "drain_before", 600.0) or 0.0
    if wall is None and launcher == "slurm":
        raise ClassesInvalid(f'{at} wall is missing; give one such as "4h", which is what Slurm is asked for')
    if wall is not None and wall <= drain + 60:
        raise ClassesInvalid(
            f"{at} wall must leave a worker more than a minute before drain_before (got {wall:g} s and {drain:g} s)"
        )
    template = Template(f"{at} template", _template_text(path, at, table))
    if launcher == "slurm" and not template.text.startswith("#!"):
        raise ClassesInvalid(f"{at} template must begin with `#!/bin/bash` or its like: sbatch takes a script")
    if launcher == "kubernetes":
        template.require("machine", "an object's name in the cluster must be new")
    return MachineClass(
        name=name,
        kind=DEVICES[device],
        device_bytes=_bytes(at, table),
        devices=_count(at, table, "devices", 1),
        jobs_per_device=_count(at, table, "jobs_per_device", 1),
        ceiling=_count(at, table, "ceiling", None),
        cooldown_seconds=_seconds(at, table, "cooldown", 60.0) or 0.0,
        wall_seconds=wall,
        drain_seconds=drain,
        factories=_factories(at, table.get("factories", defaults["factories"])),
        template=template,
        worker=_command_words(at, defaults["worker"]),
    )


def _require_known(at: str, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for field in table:
        if field not in known:
            raise ClassesInvalid(
                f"{at} has no field {field!r}; take one of {', '.join(known)}{suggestion(field, known)}"
            )


def _text(at: str, table: Mapping[str, Any], field: str, default: str) -> str:
    value = table.get(field, default)
    if not isinstance(value, str) or not value.strip():
        raise ClassesInvalid(f"{at} {field} must be a text (got {value!r})")
    return value.strip()


def _command_words(at: str, command: str) -> str:
    """The command as words that no shell, and no YAML text in quotes, reads in another way."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ClassesInvalid(f"{at} worker is not a command ({error})") from error
    strange = next((word for word in words if shlex.quote(word) != word), None)
    if strange is not None:
        raise ClassesInvalid(
            f"{at} worker must be made of plain words (got {strange!r}); put what needs quotes into the template"
        )
    return " ".join(words)


def _count(at: str, table: Mapping[str, Any], field: str, default: int | None) -> int:
    value = table.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
        missing = "is missing; it" if value is None else ""
        got = "" if value is None else f" (got {value!r})"
        raise ClassesInvalid(" ".join(f"{at} {field} {missing} must be a whole number from 1 on{got}".split()))
    return value


def _seconds(at: str, table: Mapping[str, Any], field: str, default: float | None) -> float | None:
    if field not in table:
        return default
    value = table[field]
    seconds = duration_seconds(value) if isinstance(value, str) else None
    if seconds is None:
        raise ClassesInvalid(
            f'{at} {field} must be a number with its unit (s, m, h or d), such as "10m" (got {value!r})'
        )
    return seconds


def _bytes(at: str, table: Mapping[str, Any]) -> int:
    value = table.get("device_bytes")
    if not isinstance(value, str) or value.strip() == "auto":
        raise ClassesInvalid(f'{at} device_bytes must be a size such as "79GiB" (got {value!r})')
    try:
        return amount_bytes("device_bytes", value, free_bytes=0)
    except FieldError as error:
        raise ClassesInvalid(f'{at} device_bytes must be a size such as "79GiB" (got {value!r})') from error


def _factories(at: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ClassesInvalid(f'{at} factories must be a list such as ["package.module:callable"] (got {value!r})')
    for each in value:
        if each != "*":
            try:
                require_factory("factories", each)
            except FieldError as error:
                raise ClassesInvalid(
                    f"{at} factories must be entries such as `package.module:callable`, or `*` (got {each!r})"
                ) from error
    return tuple(value)


def _template_text(path: Path, at: str, table: Mapping[str, Any]) -> str:
    if ("template" in table) == ("template_file" in table):
        raise ClassesInvalid(f"{at} must have either template, the text, or template_file, a file beside {path.name}")
    if "template" in table:
        text = table["template"]
        if not isinstance(text, str):
            raise ClassesInvalid(f"{at} template must be a text (got {text!r})")
        return text
    place = path.parent / _text(at, table, "template_file", "")
    try:
        return place.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClassesInvalid(f"{at} template_file {place} cannot be read ({error})") from error
