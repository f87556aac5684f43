"""Labels as a data file gives them: class indices, names or numbers in float64, none cut, wrapped or guessed.

====================================================  ======================================================
labels of a classification                            classes
====================================================  ======================================================
whole numbers, or texts that are all whole numbers    those
texts that all stand in the model's `id2label`        its numbers
other texts beside some that stand in `id2label`      refused
other texts, of a model whose classes have names      refused
other texts                                           their places in sorted order (by code points)
numbers among texts                                   refused
numbers that the file's schema names (`ClassLabel`)   those of these names in `id2label`; refused where one is none;
                                                      those, of a model whose classes have no names
====================================================  ======================================================

Numbers given to names stand in the record.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from catalog.requests.inputs import Task
from worker.execution.data.stream import DataRequest
from worker.execution.refusal import Refusal, is_storable, names

CLASS_TASKS = frozenset({"classification", "sequence_classification", "token_classification"})
_LARGEST_NUMBER = torch.finfo(torch.float32).max
"""A collection in float32 holds no larger target."""
_REMEDIES = {
    bool: "write 0 and 1",
    list: "several numbers in place of one come as `targets` of a `.safetensors` file, beside token ids",
}
_MOST_TEXTS = 100_000
"""Most labels that differ, where they are texts; as many as a model may have classes."""
_MOST_SORTED = 1_000
"""Most names that are numbered here, and that a record lists."""
_MOST_CHARACTERS = 100
_WHOLE = re.compile(r"[+-]?[0-9]{1,30}")
_NUMBER = re.compile(
    r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?(nan|inf|infinity)", re.IGNORECASE | re.ASCII
)
"""Python itself reads 1_0 as 10, and digits of any script."""
_UNNAMED = re.compile(r"LABEL_\d+")
"""A name that ``transformers`` gives to a class that has none."""


def label_fault(label: object, task: Task) -> str | None:
    """Return what is wrong with a label that should be a number, and what to do."""
    ignored = f", or write {task.ignore_index}, which is not counted" if task.type in CLASS_TASKS else ""
    remedy = f"write it as a number, or leave out the row{ignored}"
    if isinstance(label, bool) or not isinstance(label, (int, float)):
        return f"must be a number (got {_shown(label)}); {_REMEDIES.get(type(label), remedy)}"
    if isinstance(label, float) and not math.isfinite(label):
        return f"must be a finite number (got {label}); {remedy}"
    if task.type in CLASS_TASKS and (label != int(label) or not -(2**63) <= label < 2**63):
        return f"must be a class index, a whole number, for `{task.type}` (got {_shown(label)})"
    if abs(label) > _LARGEST_NUMBER:
        return f"must lie within ±{_LARGEST_NUMBER:.2g}, as float32 does (got {_shown(label)})"
    if task.type == "regression" and float(label) != label:
        return f"must be a number that float64 holds (got {_shown(label)}); write {float(label):.17g} if that is meant"
    return None


@dataclass(kw_only=True)
class Labels:
    """The labels of one column, taken one by one."""

    column: str
    request: DataRequest
    pointer: str
    code: str = "invalid_value"
    untyped: bool = False
    """Whether the file does not tell the number 1 from the text "1", as CSV does not; all its labels are texts."""
    _values: list[int | float | str] = field(default_factory=list)
    _texts: dict[str, str] = field(default_factory=dict)
    """Each text that a label is, with the place where it first stands."""
    _number_at: str | None = None
    """The place of the first number."""
    _schema: tuple[str, ...] | None = None
    """Names of the classes by their numbers, as the schema of each file has them; None before the first."""

    def __len__(self) -> int:
        return len(self._values)

    def add(self, label: object, where: str) -> None:
        """Take the label of one row; ``Refusal`` if no label is such, or it is one text too many."""
        if self.untyped and isinstance(label, str):
            label = self._read(label)
        if isinstance(label, str) and self.request.task.type in CLASS_TASKS:
            self._values.append(self._taken(label, where))
            return
        self._values.append(self._number(label, where))
        if self._number_at is None and label != self.request.task.ignore_index:
            self._number_at = where

    def name_classes(self, schema: Sequence[str]) -> None:
        """Take the names that a file's schema gives to class numbers, none if it has none; once for each file."""
        if self._schema is not None and self._schema != tuple(schema):
            raise self._refused(
                f"the schemas of two files give the classes of `{self.column}` different names: "
                f"{names(list(self._schema)) or 'none'} and {names(list(schema)) or 'none'}; write both with one schema"
            )
        self._schema = tuple(schema)

    def numbers(self) -> list[float]:
        """Return targets of the labels, and record the names' numbers; ``Refusal`` if those are not certain."""
        by_name = self._numbering() if self._texts else {}
        by_number = {} if self._texts else self._by_schema(self._schema or ())
        return [by_name[value] if isinstance(value, str) else by_number.get(value, value) for value in self._values]

    def _by_schema(self, schema: Sequence[str]) -> Mapping[float, float]:
        """Return the model's number of each class that the schema names."""
        if not schema or self.request.task.type not in CLASS_TASKS:
            return {}
        used = sorted({value for value in self._values if isinstance(value, int)} - {self.request.task.ignore_index})
        beyond = next((number for number in used if number >= len(schema)), None)
        if beyond is not None:
            raise self._refused(
                f"`{self.column}` has the class {beyond}, and the file's schema names {len(schema):,} classes; write "
                "the file with a name for each"
            )
        named = {number: schema[number] for number in used if number >= 0}
        classes = self.request.loaded.class_names
        if all(map(_UNNAMED.fullmatch, classes)):
            return {}
        own = _find_names(named.values(), classes)
        unknown = next((name for name in named.values() if name not in own), None)
        if unknown is not None:
            raise self._refused(
                f"`{self.column}` has the class {names([unknown])} by the file's schema, and the model's classes are "
                f"{names(list(classes), 20)} (`id2label` of config.json); give the classes these names, or write the "
                "column as whole numbers of the model's classes, without names"
            )
        self._recorded({name: own[name] for name in named.values()}, "id2label")
        moved = [name for number, name in named.items() if own[name] != number]
        if moved:
            self.request.context.notice(
                f"`{self.column}` goes by the names of its classes, which the file's schema numbers otherwise than "
                f"`id2label`: {', '.join(f'{names([name])} is {own[name]} there' for name in moved[:20])}"
                f"{'' if len(moved) <= 20 else ' …'}"
            )
        return {number: own[name] for number, name in named.items()}

    def _read(self, text: str) -> float | str | None:
        """Read a label whose type the file does not tell."""
        if not text.strip():
            named = any(_number_in(each) is None for each in self._texts)
            return text if named else None
        number = None if self.request.task.type in CLASS_TASKS else _number_in(text)
        return text if number is None else number

    def _taken(self, label: str, where: str) -> str:
        if not label.strip() or len(label) > _MOST_CHARACTERS or not is_storable(label):
            what = f"has {len(label):,} characters" if len(label) > _MOST_CHARACTERS else f"is {label!r}"
            raise self._refused(
                f"{where}: `{self.column}` {what}; a class is a whole number, or a name of 1 to {_MOST_CHARACTERS} "
                "characters"
            )
        known = self._texts.get(label)
        if known is None:
            if len(self._texts) == _MOST_TEXTS:
                raise self._refused(
                    f"{where}: `{self.column}` has more than {_MOST_TEXTS:,} texts that differ, which are not the "
                    "names of classes; name the column of labels, or take `type: regression` for numbers"
                )
            self._texts[label] = where
        return label

    def _number(self, label: Any, where: str) -> float:  # noqa: ANN401 - decoded from a file
        task = self.request.task
        fault = label_fault(label, task)
        if fault is not None:
            raise self._refused(f"{where}: `{self.column}` {fault}")
        number: float = label
        return int(number) if task.type in CLASS_TASKS else number

    def _numbering(self) -> Mapping[str, float]:
        """The number of each text."""
        classes = self.request.loaded.class_names
        own = {name: number for number, name in enumerate(classes)}
        read = {text: number for text in self._texts if (number := _number_in(text)) is not None}
        first = next(iter(self._texts))
        if self._number_at is not None:
            raise self._refused(
                f"`{self.column}` is the text {names([first])} in {self._texts[first]} and a number in "
                f"{self._number_at}; give all labels as class numbers, or all as names"
            )
        if self._texts.keys() <= own.keys():
            self._require_one_reading(read)
            return self._recorded({text: own[text] for text in self._texts}, "id2label")
        if len(read) == len(self._texts):
            self._require_one_reading(read)
            return {text: self._number(number, self._texts[text]) for text, number in read.items()}
        unknown = next(text for text in self._texts if text not in own)
        if self._texts.keys() & own.keys() or not all(map(_UNNAMED.fullmatch, classes)):
            raise self._refused(
                f"{self._texts[unknown]}: `{self.column}` is {names([unknown])}, and the model's classes are "
                f"{names(list(classes), 20)} (`id2label` of config.json); write one of these, or their numbers"
            )
        if read:
            digits = next(iter(read))
            word = next(text for text in self._texts if text not in read)
            raise self._refused(
                f"`{self.column}` is {names([digits])} in {self._texts[digits]} and {names([word])} in "
                f"{self._texts[word]}; give all labels as class numbers, or all as names"
            )
        return self._sorted(len(classes))

    def _sorted(self, classes: int) -> Mapping[str, float]:
        if self.request.block == "query":
            raise self._refused(
                f"`{self.column}` of the query holds names, which may be numbered otherwise than those of the data: "
                "give class numbers, or name the classes in `id2label` of the model's config.json"
            )
        ordered = sorted(self._texts)
        if len(ordered) > _MOST_SORTED or (classes and len(ordered) != classes):
            known = (
                f", and the model has {classes:,} classes" if classes else f"; at most {_MOST_SORTED:,} are numbered"
            )
            raise self._refused(
                f"`{self.column}` has {len(ordered):,} names, such as {names(ordered)}{known}: the number of each "
                "cannot be known; give class numbers, or name the classes in `id2label` of the model's config.json"
            )
        self.request.context.notice(
            f"`{self.column}` holds names, and the model's classes have none: they are numbered in sorted order, "
            f"{', '.join(f'{names([name])} {number}' for number, name in enumerate(ordered[:20]))}"
            f"{'' if len(ordered) <= 20 else ' …'}"
        )
        return self._recorded({name: number for number, name in enumerate(ordered)}, "sorted")

    def _recorded(self, numbering: dict[str, int], order: str) -> Mapping[str, float]:
        listed = sorted(numbering.items(), key=lambda each: each[1])[:_MOST_SORTED]
        self.request.context.describe("labels", {"order": order, "names": len(numbering), "numbers": dict(listed)})
        return numbering

    def _require_one_reading(self, read: Mapping[str, float]) -> None:
        """Refuse numbers that are names of other classes, where the file cannot say which of both they are."""
        own = {name: number for number, name in enumerate(self.request.loaded.class_names)}
        for text, number in read.items() if self.untyped else ():
            if label_fault(number, self.request.task) is not None:
                continue
            # pandas writes 1 as 1.0 where a row of the column was empty
            for name in (text, str(int(number))):
                if own.get(name, number) != number:
                    raise self._refused(
                        f"`{self.column}` holds {text}, which is the number of one class and, by `id2label`, the name "
                        f'of class {own[name]}; give JSON lines, where 1 is a number and "1" a name'
                    )

    def _refused(self, message: str) -> Refusal:
        return Refusal(message, pointer=self.pointer, code=self.code)


def class_names(id2label: object) -> tuple[str, ...]:
    """Return the names of a model's classes by their numbers; none where a name is missing or stands twice."""
    if not isinstance(id2label, dict) or len(id2label) > _MOST_TEXTS:
        return ()
    by_number = {str(number): name for number, name in id2label.items()}
    found = tuple(by_number.get(str(number)) for number in range(len(by_number)))
    named = tuple(name for name in found if isinstance(name, str) and len(name) <= _MOST_CHARACTERS)
    return named if len(set(named)) == len(found) else ()


def _find_names(wanted: Iterable[str], classes: Sequence[str]) -> dict[str, int]:
    """Return the number of each name among classes: of the same name, else of the one that differs in case alone."""
    wanted = list(wanted)
    exact = {name: number for number, name in enumerate(classes)}
    if exact.keys() >= set(wanted):
        return {name: exact[name] for name in wanted}
    folded = {name.casefold(): number for name, number in exact.items()}
    if len(folded) < len(exact) or len({name.casefold() for name in wanted}) < len(wanted):
        folded = exact
    return {name: folded[name.casefold()] for name in wanted if name.casefold() in folded}


def _number_in(text: str) -> float | None:
    """The number that a text is; None where it is none."""
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text.strip()) else None


def _shown(label: object) -> str:
    # a number of 5,000 digits has no text within Python's own limit
    if isinstance(label, int) and abs(label) >= 10**30:
        return "a number of more than 30 digits"
    return repr(label)[:60]
