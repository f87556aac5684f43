"""Text rows: the fields of a file's rows that are a text, the other half of its pair, and its label.

What a row holds besides is not read, and is listed: by name, once for the file. A field that would change what is
measured if it were read (the other half of a pair, token ids, a weight) is refused with the remedy, or a notice.
"""

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from catalog.requests.data_sources import FileOptions
from catalog.requests.inputs import EMBEDDINGS
from worker.execution.loaded_model import Vocabulary
from worker.execution.loader_context import LoaderContext
from worker.execution.refusal import Refusal, is_storable, names

PAIRS = (
    ("text", "text_pair"), ("text1", "text2"), ("text_1", "text_2"), ("text_a", "text_b"),
    ("sentence1", "sentence2"), ("sentence_1", "sentence_2"), ("sentence_a", "sentence_b"), ("sent1", "sent2"),
    ("sequence1", "sequence2"), ("premise", "hypothesis"), ("question1", "question2"), ("question", "context"),
    ("question", "sentence"), ("question", "passage"), ("query", "passage"),
    ("query", "document"), ("claim", "evidence"), ("s1", "s2"),
)  # fmt: skip
"""Names by which the two halves of a pair go, in lower case."""
_TEXTS = ("text", "sentence", "content")
"""Names of a text by itself, the first one there; another one must not differ."""
LABELS = ("label", "labels", "target", "targets")
"""Names of a label, the first one there; another one must not differ."""
_TENSORS = frozenset({"input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds", "pixel_values"})
_WEIGHTS = frozenset({"weight", "weights", "sample_weight", "sample_weights"})
_SECOND = frozenset(second for _, second in PAIRS) - set(_TEXTS)
LABELLED = ("classification", "sequence_classification", "regression")
"""Tasks whose targets are labels, one for each text."""


@dataclass(frozen=True, kw_only=True)
class TextFields:
    """The fields that are read."""

    text: str
    pair: str | None
    """The other half of a pair, which the tokenizer joins to the text."""
    label: str | None


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A field that is not read, with a usual name for what another one is read as."""

    key: str
    """The field of the document that decides between both."""
    read: str
    other: str


def find_rivals(there: Iterable[str], chosen: TextFields, task: str, source: FileOptions) -> list[Rival]:
    """Return the fields that could be read in place of those chosen by their usual names."""
    usual: list[tuple[str, str | None, tuple[str, ...]]] = [
        ("label_key", chosen.label if task in LABELLED else None, LABELS)
    ]
    if chosen.pair is None:
        usual.append(("text_key", chosen.text, _TEXTS))
    return [
        Rival(key=key, read=read, other=name)
        for key, read, known in usual
        if read is not None and getattr(source, key) is None
        for name in there
        if name.lower() in known and name not in (read, source.text_key, source.pair_key, source.label_key)
    ]


def require_one_reading(row: Mapping[str, object], rivals: Iterable[Rival], where: str, pointer: str) -> None:
    """Refuse a row in which a field and its rival differ; an absent one, or a number for a text, is no reading."""
    for rival in rivals:
        read, other = row.get(rival.read), row.get(rival.other)
        if read is None or other is None or read == other or str(read) == str(other):
            continue
        if rival.key == "text_key" and not isinstance(other, str):
            continue
        block = pointer.split("/")[1]
        raise Refusal(
            f"{where}: {names([rival.read])} is {repr(read)[:40]} and {names([rival.other])} is {repr(other)[:40]}, "
            f"and either could be meant; name the one to read (`{block}.{rival.key}: {rival.read}`)",
            pointer=pointer,
            code="ambiguous_fields",
        )


def choose_fields(there: Sequence[str], task: str, pointer: str, source: FileOptions) -> TextFields:
    """Choose a row's fields by the document, else by usual names; ``Refusal`` for no text, or for two readings."""
    chosen = _choose(there, task, pointer, source)
    named = (source.text_key, source.pair_key, source.label_key)
    label = chosen.label if task in LABELLED else None
    for field, name in (("text_key", chosen.text), ("pair_key", chosen.pair), ("label_key", label)):
        if name is None or name in named:
            continue
        twin = next((other for other in there if other != name and other.lower() == name.lower()), None)
        if twin is not None and twin not in named:
            raise Refusal(
                f"{names([name, twin])} differ in case alone, and one is read; name it (`{field}: {name}`), or leave "
                "the other out",
                pointer=pointer,
                code="ambiguous_fields",
            )
    return chosen


def _choose(there: Sequence[str], task: str, pointer: str, source: FileOptions) -> TextFields:
    require_no_tensors(there, pointer)
    for field in ("text_key", "pair_key", "label_key"):
        name = getattr(source, field)
        if name is not None and name not in there:
            raise Refusal(
                f"there is no `{name}`; there are {names(list(there), 20)}", pointer=f"/data/{field}", code="no_column"
            )
    known = {name.lower(): name for name in there if name not in (source.text_key, source.label_key)}
    label = source.label_key or next((known[name] for name in LABELS if name in known), None)
    if source.text_key is not None:
        require_pair_named(there, source.text_key, source.pair_key, task, "pair_key")
        if source.pair_key is not None:
            require_pairs_make_sense(source.text_key, source.pair_key, task, "/data/pair_key")
        return TextFields(text=source.text_key, pair=source.pair_key, label=None if label == source.pair_key else label)
    pairs = [(known[one], known[other]) for one, other in PAIRS if one in known and other in known]
    single = next((known[name] for name in _TEXTS if name in known), None)
    if len(pairs) > 1 or (pairs and single is not None and single not in pairs[0]):
        raise Refusal(
            f"more than one reading of {names(list(there), 20)} is possible; name the columns (`text_key`, `pair_key`) "
            "or the text `text`, and the other half of a pair `text_pair`, and leave the others out",
            pointer=pointer,
            code="ambiguous_fields",
        )
    if pairs:
        require_pairs_make_sense(*pairs[0], task, pointer)
        return TextFields(text=pairs[0][0], pair=pairs[0][1], label=label)
    if single is None:
        raise Refusal(
            f"there is no `text` among {names(list(there), 20)}; name the column (`text_key`, of pairs `pair_key` too) "
            "or name the text `text`, and the other half of a pair `text_pair`",
            pointer=pointer,
            code="wrong_format",
        )
    half = next((known[name] for name in known if name in _SECOND), None)
    if half is not None and task in LABELLED:
        raise _half(single, half, "name the halves `text` and `text_pair`, or leave it out", pointer)
    return TextFields(text=single, pair=None, label=label)


def require_pairs_make_sense(text: str, pair: str, task: str, pointer: str) -> None:
    """Refuse pairs where each text is embedded by itself."""
    if task in EMBEDDINGS:
        raise Refusal(
            f"`{text}` and `{pair}` are two texts, and `{task}` embeds each by itself; give every text a "
            "row of its own",
            pointer=pointer,
            code="unused_field",
        )


def require_pair_named(there: Sequence[str], text: str, pair: str | None, task: str, field: str) -> None:
    """Refuse a table of pairs of which the document names one half, where a label belongs to both."""
    known = {name.lower(): name for name in there}
    if pair is None and task in LABELLED:
        other = next((known[b] for a, b in PAIRS if a == text.lower() and b in known), None)
        if other is not None:
            raise _half(text, other, f"name it (`{field}: {other}`), or give a file without it", f"/data/{field}")


def require_no_tensors(there: Sequence[str], pointer: str) -> None:
    """Refuse rows of numbers that the model's arguments are."""
    found = [name for name in there if name.lower() in _TENSORS]
    if found:
        raise Refusal(
            f"{names(found)} would be numbers for the model, and texts are read here; give them as tensors in a "
            "`.safetensors` file, or leave them out",
            pointer=pointer,
            code="unused_field",
        )


def require_text(value: object, name: str, where: str, pointer: str, code: str = "wrong_format") -> str:
    """Return the value of a text's column; ``Refusal`` if it is not text."""
    if not isinstance(value, str):
        raise Refusal(
            f"{where}: `{name}` must be a string (got {repr(value)[:60]}); leave out the row, or write its text; "
            "numbers for the model come as tensors of a `.safetensors` file",
            pointer=pointer,
            code=code,
        )
    if not is_storable(value):
        raise Refusal(
            f"{where}: `{name}` holds half of a surrogate pair, which is not a character; "
            "write both halves, or the character itself",
            pointer=pointer,
            code="wrong_format",
        )
    return value


def list_unused(there: Iterable[str], used: Iterable[str | None], where: str, context: LoaderContext) -> None:
    """List the fields of a file that are not read, with a notice of those that would change numbers."""
    read = set(used)
    for name in dict.fromkeys(there):
        if name in read:
            continue
        context.unused(f"`{name}` of {where}")
        if name.lower() in _WEIGHTS:
            context.notice(f"`{name}` of {where} is not read: every example counts once")
        elif name.lower() in _SECOND:
            context.notice(f"`{name}` of {where} is not read: it looks like the other half of a pair")


def _half(text: str, other: str, remedy: str, pointer: str) -> Refusal:
    return Refusal(
        f"`{other}` stands beside `{text}` and looks like the other half of a pair, which the labels are of; {remedy}",
        pointer=pointer,
        code="unused_field",
    )


def reads_mask(vocabulary: Vocabulary) -> bool:
    """Return whether a model is given which tokens are padding; one that takes bare ids is not asked."""
    return not vocabulary.arguments or "attention_mask" in vocabulary.arguments


def cut_places(lengths: Sequence[int], vocabulary: Vocabulary) -> list[int]:
    """Return the places of the texts, by their tokens, that may not share a batch with the text before them.

    A model that reads no mask, as FNet, takes padding for text: a batch has texts of one length. LongRoPE takes short
    or long factors by the longest text of a batch: it has texts of one side. Otherwise what a model gives for one text
    would depend on the others of its batch.
    """
    sides = [
        (0 if reads_mask(vocabulary) else length, bisect.bisect_left(vocabulary.length_steps, length))
        for length in lengths
    ]
    return [place for place, (one, other) in enumerate(itertools.pairwise(sides), 1) if one != other]


def batch_bounds(lengths: Sequence[int], batch_size: int, vocabulary: Vocabulary) -> Iterator[slice]:
    """Yield the texts of each batch, by their tokens, in order."""
    begin = 0
    for end in (*cut_places(lengths, vocabulary), len(lengths)):
        for start in range(begin, end, batch_size):
            yield slice(start, min(start + batch_size, end))
        begin = end
