"""Errors of a document's fields, as sentences by which its writer can mend it.

Takes the plain dicts of pydantic's ``ValidationError.errors()``; each complaint names the field
by a JSON pointer, and says the remedy. Values are never echoed except where a record's own
sentence quotes a short one.
"""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args, get_type_hints

from catalog.record import FieldError, record

_MAX_COMPLAINTS = 20
_MOST_NAMES = 10

_SENTENCES = {
    "missing": "is missing; it must be given",
    "finite_number": "is not a finite number; take an ordinary number",
    "json_invalid": "is not valid JSON",
    "int_type": "must be an integer (without quotes or a decimal point)",
    "float_type": "must be a number (without quotes)",
    "bool_type": "must be true or false",
    "int_parsing": "must be a whole number, such as 20",
    "int_from_float": "must be a whole number, such as 20",
    "int_parsing_size": "is a larger number than any that is taken here; take a smaller one",
    "float_parsing": "must be a number, such as 0.5",
    "bool_parsing": "must be true or false",
    "string_type": "must be a string",
    "dict_type": "must be an object",
    "mapping_type": "must be an object",
    "tuple_type": "must be a list",
    "dataclass_type": "must be an object",
    "none_required": "must be null",
}


@record
class Complaint:
    """One fault."""

    pointer: str
    """JSON pointer (RFC 6901) to the field."""
    code: str
    message: str


def complaints(errors: Iterable[Mapping[str, Any]], document: type) -> tuple[Complaint, ...]:
    """Translate validation errors into complaints with pointers and remedies.

    Args:
        errors: Errors as pydantic lists them.
        document: The record that was validated, for the names of its fields.

    Returns:
        At most twenty complaints, in the order of the errors, without repetitions.
    """
    said: dict[tuple[str, str], Complaint] = {}
    for error in errors:
        if len(said) >= _MAX_COMPLAINTS:
            break
        complaint = _complaint(error, document)
        said.setdefault((complaint.pointer, complaint.message), complaint)
    every = list(said.values())
    return tuple(_with_number(complaint, every) for complaint in every if not _is_other_branch(complaint, every))


def _with_number(complaint: Complaint, said: list[Complaint]) -> Complaint:
    """Name the number among the choices of a field that takes one too."""
    number = any(other.pointer == complaint.pointer and other.code == "int_type" for other in said)
    if complaint.code != "invalid_choice" or not number:
        return complaint
    return dataclasses.replace(complaint, message=complaint.message.replace("take ", "take a whole number or ", 1))


def _is_other_branch(complaint: Complaint, said: list[Complaint]) -> bool:
    """Whether the fault is of a union's member that the writer did not mean.

    `kind: [x]` is not a choice itself besides holding a wrong one; `kind: x` is not a list besides
    being a wrong choice. The nearer fault is the one to mend.
    """
    for other in said:
        if complaint.code == "invalid_choice" and other.pointer.startswith(f"{complaint.pointer}/"):
            return True
        same = other.pointer == complaint.pointer and other.code == "invalid_choice"
        if same and complaint.code.endswith("_type"):
            return True
    return False


def _complaint(error: Mapping[str, Any], document: type) -> Complaint:
    kind = str(error["type"])
    path, owners = _steps(error["loc"], document)
    context = error.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, FieldError):
        return Complaint(
            pointer=_pointer((*path, *cause.field.split("."))), code="invalid_value", message=cause.message
        )
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        message = _unknown(str(path[-1]), owners, document)
        return Complaint(pointer=_pointer(path), code="unknown_field", message=message)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        field = str(context["discriminator"]).strip("'")
        choices = str(context.get("expected_tags", "")) or "builtin, huggingface, directory, upload, factory"
        wrong = "is missing" if kind == "union_tag_not_found" else "is unknown"
        near = suggestion(context.get("tag"), choices.replace("'", "").split(", "))
        return Complaint(
            pointer=_pointer((*path, field)), code="invalid_choice", message=f"{wrong}; take one of {choices}{near}"
        )
    if kind == "literal_error":
        expected = str(context.get("expected", "another value"))
        near = suggestion(error.get("input"), re.findall("'([^']*)'", expected))
        message = f"is not a choice here; take {expected}{near}"
        return Complaint(pointer=_pointer(path), code="invalid_choice", message=message)
    message = _SENTENCES.get(kind) or f"is not accepted: {error['msg']}"
    return Complaint(pointer=_pointer(path), code=kind, message=message)


def _steps(loc: Iterable[Any], document: type) -> tuple[tuple[str | int, ...], list[type]]:
    """The path, without what pydantic adds for union members (`builtin`, `tuple[...]`) and no document holds.

    And the records that could hold its last step.
    """
    steps: list[str | int] = []
    here: Any = document
    owners: list[type] = []
    for step in loc:
        if isinstance(step, int):
            steps.append(step)
            here = None
            owners = []
            continue
        members = _records(here)
        # the union's tag comes before any field, and may be spelled like one: `factory`
        chosen = next((member for member in members if len(members) > 1 and _tag(member) == step), None)
        if chosen is not None:
            here = chosen
            continue
        owners = members
        field = next((get_type_hints(m, include_extras=True)[step] for m in members if step in _names(m)), None)
        if field is not None:
            steps.append(step)
            here = field
        elif members or (here is None and not _is_branch(step)):
            steps.append(step)
            here = None
        elif not _is_branch(step):
            steps.append(step)
    return tuple(steps), owners


def _is_branch(step: str) -> bool:
    return step in ("str", "int", "float", "none") or step.startswith(
        ("tuple[", "literal[", "function-", "constrained")
    )


def _records(annotation: Any) -> list[type]:  # noqa: ANN401
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return [annotation]
    return [found for part in get_args(annotation) for found in _records(part)]


def _names(member: type) -> set[str]:
    return {field.name for field in dataclasses.fields(member)}


def _tag(member: type) -> str | None:
    if "source" not in _names(member):
        return None
    return str(get_args(get_type_hints(member)["source"])[0])


def _unknown(wrong: str, owners: list[type], document: type) -> str:
    """Say where the field's meaning lives here, or the nearest spelling, or what there is."""
    known = spellings(document)
    if wrong in known:
        return f"is no field here; it is {known[wrong].written}"
    names = sorted(set().union(*(_names(member) for member in owners)))
    near = nearest(wrong, names)
    if near:
        return f"is no field here; did you mean `{near}`?"
    return f"is no field here; there are {', '.join(names)}"


def suggestion(wrong: object, choices: Iterable[str]) -> str:
    """Return the end of a message that names the nearest choice, such as `; did you mean `capacity`?`, or nothing.

    The value that is not a choice is not repeated.
    """
    near = nearest(wrong, choices)
    return f"; did you mean `{near}`?" if near else ""


def near_names(wrong: object, names: Iterable[str]) -> str:
    """Return the end of a message about a name that is not there: the nearest one, else the first ten.

    Args:
        wrong: The name that is not there; a long one has no near ones.
    """
    listed = list(names)
    there = ", ".join(map(repr, listed[:_MOST_NAMES])) or "none"
    more = " and more" if len(listed) > _MOST_NAMES else ""
    return suggestion(wrong, listed) or f"; there are {there}{more}"


def nearest(wrong: object, choices: Iterable[str]) -> str | None:
    """Return the choice that a word is most likely a slip of; None where nothing is near."""
    if not isinstance(wrong, str) or not 0 < len(wrong) < 64:
        return None
    words = {word.lower(): word for word in choices}
    begun = [word for word in words if word.startswith(wrong.lower())]
    near = difflib.get_close_matches(wrong.lower(), words, n=1) or begun
    return words[near[0]] if near else None


@record
class Spelling:
    """What an older or bare name of a field is here."""

    place: str
    """The field, with the blocks that it stands in."""
    note: str = ""
    """How the older values read here; empty where they are the same."""
    namesake: str | None = None
    """A field of another block that has the very name of the older spelling."""

    @property
    def written(self) -> str:
        """The places, as a message or a table names them."""
        further = "" if self.namesake is None else f", or `{self.namesake}`"
        return f"`{self.place}`{f' ({self.note})' if self.note else ''}{further}"


def spellings(document: type, prefix: str = "") -> dict[str, Spelling]:
    """Collect older and bare spellings of the document's nested fields.

    Args:
        document: The record of the document, or of one of its blocks.
        prefix: The path of that block with a dot at its end; empty for the whole document.

    Returns:
        The place that each spelling has here.
    """
    found: dict[str, Spelling] = {}
    hints = get_type_hints(document, include_extras=True)
    for field in dataclasses.fields(document):
        place = f"{prefix}{field.name}"
        for name, note in field.metadata.get("known_as", {}).items():
            found.setdefault(str(name), Spelling(place=place, note=str(note)))
        if prefix:
            found.setdefault(field.name, Spelling(place=place))
        nested = _records(hints[field.name])
        if len(nested) == 1:
            for name, where in spellings(nested[0], f"{place}.").items():
                known = found.setdefault(name, where)
                if not known.place.endswith(f".{name}") and where.place.endswith(f".{name}"):
                    found[name] = dataclasses.replace(known, namesake=known.namesake or where.place)
    for own in () if prefix else hints:  # a block of the document itself, which stands in another one too
        found.pop(own, None)
    return found


def _pointer(path: Iterable[str | int]) -> str:
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in path)
