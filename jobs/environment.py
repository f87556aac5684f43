"""Environment variables read into the fields of a settings model, and refused in sentences.

A field ``slots`` is read from ``KRONOSCOPE_SLOTS`` unless its annotation names other `Variables`. Its default, bounds
and docstring stand in the model alone: error messages and the table of docs/operations.md are made from them. A field
that no representation shows (``repr=False``) is a secret, and is also read from the file that ``NAME_FILE`` names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self, get_args

from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from catalog.duration import duration_seconds
from jobs.errors import SettingsInvalid

PREFIX = "KRONOSCOPE_"
_MAX_SECRET_BYTES = 65_536
_SHOWN_CHARACTERS = 40
_KINDS = {"float_parsing": "number", "int_parsing": "whole number"}
_UNITS = {"_seconds": "seconds", "_bytes": "bytes", "_days": "days"}


@dataclass(frozen=True)
class Variables:
    """The environment variables of a field, the first that is set counts; without names it is read from none."""

    names: tuple[str, ...] = ()
    shown: str | None = None
    """The default as the documents show it, where it is computed."""


def _flag(value: object) -> object:
    known = {"0": False, "false": False, "1": True, "true": True}
    if not isinstance(value, str):
        return value
    if value.lower() not in known:
        raise ValueError(f"is neither 0 nor 1 (got {value[:_SHOWN_CHARACTERS]!r}); take one of them")
    return known[value.lower()]


def _duration(value: object) -> object:
    if not isinstance(value, str):
        return value
    seconds = duration_seconds(value)
    if seconds is None:
        shown = value[:_SHOWN_CHARACTERS]
        raise ValueError(f"is not a duration (got {shown!r}); write a number with its unit (s, m, h or d), such as 10m")
    return seconds


def split_list(text: str) -> tuple[str, ...]:
    """Return the parts of a comma list that are not empty, without blanks around them."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


Flag = Annotated[bool, BeforeValidator(_flag)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Duration = Annotated[float, BeforeValidator(_duration)]
"""Seconds, written with a unit: ``10m``."""
Limit = Annotated[float, BeforeValidator(lambda value: 0.0 if value == "0" else _duration(value))]
"""A duration; 0 is none."""
CommaList = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: split_list(value) if isinstance(value, str) else value)
]
Folder = Annotated[Path, AfterValidator(Path.absolute)]


class EnvironmentSettings(BaseSettings):
    """Settings that are read once, at the process's edge; built in code they read no environment at all."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
    )

    @classmethod
    def settings_customise_sources(  # type: ignore[override]  # it is called by names
        cls, *_: object, init_settings: PydanticBaseSettingsSource, **__: object
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take the values that the constructor is given, and no others."""
        return (init_settings,)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], **defaults: object) -> Self:
        """Read the settings.

        Args:
            environ: The environment's variables; an empty one counts as not set.
            defaults: Values of fields that hold where no variable is set, in place of the model's.

        Returns:
            The settings, checked.

        Raises:
            SettingsInvalid: If a variable is missing or its value makes no sense.
        """
        values = defaults | cls.read_values(environ)
        try:
            return cls(**values)
        except ValidationError as error:
            raise SettingsInvalid(_sentence(cls, error, values)) from None

    @classmethod
    def read_values(cls, environ: Mapping[str, str]) -> dict[str, Any]:
        """Return the text of those fields that the environment names; models that override this add computed fields."""
        return EnvironmentSource(cls, environ)()


class EnvironmentSource(PydanticBaseSettingsSource):
    """The fields of one model in a mapping of environment variables, secrets in the files it names."""

    def __init__(self, model: type[BaseSettings], environ: Mapping[str, str]) -> None:
        super().__init__(model)
        self._environ = environ

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[str | None, str, bool]:
        """Return the text of one field, read from the first of its variables that is set, or None; its name; and False.

        False says that the text is not JSON. A field without `repr` is a secret and may be in a file.
        """
        for name in variables_of(field_name, field).names:
            text = self._environ.get(name) if field.repr else secret(self._environ, name)
            if text:
                return text, field_name, False
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        """Return the texts of all fields that are set, by the fields' names."""
        texts = {name: self.get_field_value(field, name)[0] for name, field in self.settings_cls.model_fields.items()}
        return {name: text for name, text in texts.items() if text is not None}


def variables_of(name: str, field: FieldInfo) -> Variables:
    """Return the environment variables that a field is read from."""
    return next((each for each in field.metadata if isinstance(each, Variables)), Variables((PREFIX + name.upper(),)))


def secret(environ: Mapping[str, str], name: str) -> str | None:
    """Return a secret, from its variable or from the file that ``NAME_FILE`` names (as containers pass secrets).

    Args:
        environ: The environment's variables.
        name: The secret's variable.

    Returns:
        The secret; of a file without the blanks around it. None where neither variable is set.

    Raises:
        SettingsInvalid: If both are set, or the file cannot be read.
    """
    value, path = environ.get(name), environ.get(f"{name}_FILE")
    if value and path:
        raise SettingsInvalid(f"both {name} and {name}_FILE are set; keep one of them")
    if not path:
        return value or None
    try:
        with Path(path).open("rb") as file:
            raw = file.read(_MAX_SECRET_BYTES + 1)
        text = raw.decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsInvalid(
            f"{name}_FILE cannot be read ({type(error).__name__}); point it to a text file"
        ) from error
    if not text or len(raw) > _MAX_SECRET_BYTES:
        raise SettingsInvalid(f"{name}_FILE holds {len(raw):,} bytes; expected 1 to {_MAX_SECRET_BYTES:,}")
    return text


def _sentence(model: type[BaseSettings], error: ValidationError, values: Mapping[str, object]) -> str:
    """Say of the first field that is wrong what it is and what it may be."""
    first = error.errors(include_url=False, include_context=True)[0]
    field_name = str(first["loc"][0])
    field = model.model_fields[field_name]
    name = next(iter(variables_of(field_name, field).names), field_name)
    if first["type"] == "missing":
        return f"{name} is not set; set it"
    if first["type"] == "value_error":
        return f"{name} {first['ctx']['error']}"
    value = str(values.get(field_name))[:_SHOWN_CHARACTERS] if field.repr else "…"
    kind = next((f"not a {each} (got {value!r})" for start, each in _KINDS.items() if first["type"] == start), value)
    return f"{name} is {kind}; {_remedy(field_name, field)}"


def _remedy(name: str, field: FieldInfo) -> str:
    choices = [str(choice) for choice in get_args(field.annotation) if isinstance(choice, str)]
    if choices:
        return f"take one of {', '.join(choices)}"
    units = next((f" {unit}" for suffix, unit in _UNITS.items() if name.endswith(suffix)), "")
    optional = ", or leave it out" if type(None) in get_args(field.annotation) else ""
    return f"take {bounds_of(field)}{units}{optional}"


def bounds_of(field: FieldInfo) -> str:
    """Return the numbers that a field takes, in words."""
    bounds = {type(each): each for each in field.metadata if isinstance(each, (Ge, Gt, Le))}
    low, above, high = bounds.get(Ge), bounds.get(Gt), bounds.get(Le)
    if isinstance(low, Ge):
        return f"{low.ge} to {high.le}" if isinstance(high, Le) else f"{low.ge} or more"
    return f"more than {above.gt}" if isinstance(above, Gt) else "another value"
