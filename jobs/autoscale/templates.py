"""Templates of the text for a launcher to start one machine, with placeholders such as ``{{ worker }}``.

Double braces are told apart from all that shells, Slurm and YAML write by themselves. The placeholders are

::

    worker         the command of the worker, with its settings: one line of words that no shell changes (required)
    machine        the machine's id, which is new for each
    class          the name of the machine's class
    devices        devices of the machine
    device_bytes   what one job may have of a device, in bytes
    wall_seconds   for how long the machine is lent; so does wall_minutes, rounded up
"""

import re
from collections.abc import Mapping

from jobs.autoscale.errors import ClassesInvalid

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
