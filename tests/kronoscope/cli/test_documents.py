from pathlib import Path

import pytest

from kronoscope.cli.documents import DocumentUnreadable, read_document


def read(tmp_path: Path, text: str | bytes, *settings: str, name: str = "job.yaml") -> dict[str, object]:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_document(path, settings)


def test_numbers_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    found = read(tmp_path, "a: 1e-4\nb: 1.0e+6\nc: 0\nd: no\ne: null\nf: on\ng: 010\n")
    assert found == {"a": 1e-4, "b": 1e6, "c": 0, "d": "no", "e": None, "f": "on", "g": 10}
    assert isinstance(found["a"], float)


def test_json_is_read_by_its_suffix(tmp_path: Path) -> None:
    assert read(tmp_path, '{"kind": "capacity"}', name="job.json") == {"kind": "capacity"}
    with pytest.raises(DocumentUnreadable, match="line 1, column 10"):
        read(tmp_path, '{"kind": capacity}', name="job.json")


def test_set_puts_values_of_every_type(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "kind: capacity\ncollection: {batch_size: 4}\nmemory:\n",
        "collection.batch_size=32",
        "stabilisation.damping=1e-4",
        "stabilisation.kappa_max=null",
        "memory.host=20GiB",
        "kind=[factors, capacity]",
        "labels.note=a=b",
    )
    assert found == {
        "kind": ["factors", "capacity"],
        "collection": {"batch_size": 32},
        "stabilisation": {"damping": 1e-4, "kappa_max": None},
        "memory": {"host": "20GiB"},
        "labels": {"note": "a=b"},
    }


@pytest.mark.parametrize("setting", ["nothing", "=3", "a..b=1", "kind.deeper=1", "a=[1"])
def test_a_setting_that_cannot_be_is_named(tmp_path: Path, setting: str) -> None:
    with pytest.raises(DocumentUnreadable, match="--set"):
        read(tmp_path, "kind: capacity", setting)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not a mapping"),
        ("- a", "is not a mapping"),
        ("a: [1", "not valid YAML at line"),
        ("a: 1\na: 2", "not valid YAML at line 2"),
        ("a: .nan", "/a is not a finite number"),
        ("a: {b: [1, .inf]}", "/a/b/1 is not a finite number"),
        ("a: 2020-01-01", "/a is a date; put it in quotes"),
        ("1: a", "key that is not a string"),
        ("a: !!python/object/apply:os.system [id]", "not valid YAML"),
        (b"\xff\xfe", "not UTF-8"),
        ('a: {b: "\\ud800"}', "/a/b has half of a character"),
        ('a: {"\\ud800": [{}]}', "/a has half of a character"),
        ("a: 0x" + "f" * 9000, "/a is an integer of 36,000 bits"),
        ("a: '" + "x" * 300_000 + "'", "has more than 262,144 bytes"),
        ("a: &a [1, &b 2]\n" + "".join(f"k{n}: &k{n} [*{p}, *{p}, *{p}, *{p}]\n" for n, p in
         enumerate(["a", "k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7", "k8"])), "holds more than"),
    ],
)  # fmt: skip
def test_what_is_no_document_is_said_in_a_sentence(tmp_path: Path, text: str | bytes, said: str) -> None:
    with pytest.raises(DocumentUnreadable, match=said) as refused:
        read(tmp_path, text)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("NaN", "NaN is not a JSON number"),
        ("{", "not valid JSON"),
        ('{"a": 1, "a": 2}', "`a` stands twice"),
        ("[" * 99_999, "JSON"),
        ('{"a": "\\ud800"}', "/a has half of a character"),
    ],
)
def test_what_is_no_json_is_said_in_a_sentence(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(DocumentUnreadable, match=said):
        read(tmp_path, text, name="job.json")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DocumentUnreadable, match=r"absent\.yaml: cannot be read"):
        read_document(tmp_path / "absent.yaml")
