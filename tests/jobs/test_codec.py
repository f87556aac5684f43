"""Bad bodies: each named with its place and remedy, none echoed, each in well under a second."""

import json
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catalog import DOCUMENT
from jobs.codec import MAX_BODY_BYTES, document_json, guard_body, parse_claim, parse_document, sha256_of
from jobs.errors import DocumentRefused

GOOD: dict[str, Any] = {
    "kind": "capacity",
    "model": {"source": "builtin", "name": "digits_mlp"},
    "data": {"source": "builtin", "name": "digits"},
    "task": {"type": "classification"},
}


def body(**changes: Any) -> bytes:
    return json.dumps(GOOD | changes).encode()


def with_seed(text: str) -> bytes:
    return body(collection={"seed": 7}).replace(b'"seed": 7', b'"seed": ' + text.encode())


CASES: dict[str, tuple[bytes, str, str]] = {
    "empty": (b"", "", "json_invalid"),
    "blank": (b" \n\t", "", "json_invalid"),
    "cut off": (b"{", "", "json_invalid"),
    "null": (b"null", "", "dict_type"),
    "list": (b"[]", "", "dict_type"),
    "string": (b'"capacity"', "", "dict_type"),
    "number": (b"NaN", "", "dict_type"),
    "UTF-16": (body().decode().encode("utf-16"), "", "json_invalid"),
    "UTF-16 without mark": (body().decode().encode("utf-16-le"), "", "json_invalid"),
    "byte order mark": (b"\xef\xbb\xbf" + body(), "", "json_invalid"),
    "invalid UTF-8": (body().replace(b"digits_mlp", b"digits\xff"), "", "json_invalid"),
    "NaN": (with_seed("NaN"), "/collection/seed", "finite_number"),
    "Infinity": (with_seed("Infinity"), "/collection/seed", "finite_number"),
    "-Infinity": (with_seed("-Infinity"), "/collection/seed", "finite_number"),
    "1e999": (body(stabilisation={"damping": 1}).replace(b"1}", b"1e999}"), "/stabilisation/damping", "finite_number"),
    "true for an int": (with_seed("true"), "/collection/seed", "int_type"),
    "text for an int": (with_seed('"12"'), "/collection/seed", "int_type"),
    "3.0 for an int": (with_seed("3.0"), "/collection/seed", "int_type"),
    "2^63": (with_seed(str(2**63)), "/collection/seed", "finite_number"),
    "-2^63-1": (with_seed(str(-(2**63) - 1)), "/collection/seed", "finite_number"),
    "5000 digits": (with_seed("9" * 5000), "/collection/seed", "finite_number"),
    "-1": (with_seed("-1"), "/collection/seed", "invalid_value"),
    "NUL in a string": (body(labels={"a": "b\0c"}), "/labels/a", "nul_character"),
    "NUL in a key": (body(labels={"a\0": "b"}), "/labels", "nul_character"),
    "half a surrogate pair": (body(labels={"a": "\ud800"}), "/labels/a", "lone_surrogate"),
    "raw control character": (body(labels={"a": "b"}).replace(b'"b"', b'"\x01"'), "", "json_invalid"),
    "unknown key": (body(damping=1), "/damping", "unknown_field"),
    "a key twice": (b'{"kind": "capacity", "kind": "factors"}', "", "repeated_key"),
    "17 deep": (body(labels={}).replace(b'"labels": {}', b'"labels": ' + b"[" * 16 + b"]" * 16), "", "too_deep"),
    "100,000 deep": (b'{"a":' * 100_000, "", "body_too_large"),
    "40,000 deep": (b"[" * 40_000 + b"]" * 40_000, "", "too_deep"),
    "10,000 keys": (json.dumps({f"k{n}": n for n in range(10_000)}).encode(), "", "too_many_keys"),
    "257 KiB": (body(labels={"a": "x" * 257 * 1024}), "", "body_too_large"),
    "a string of 50 MB": (b'{"kind": "' + b"x" * 50_000_000 + b'"}', "", "body_too_large"),
    "quotes and backslashes": (b'{"' + b'\\"' * 120_000, "", "json_invalid"),
    "two documents": (body() + body(), "", "json_invalid"),
    "unknown kind": (body(kind="capasity"), "/kind", "invalid_choice"),
    "no model": (json.dumps({key: GOOD[key] for key in GOOD if key != "model"}).encode(), "/model", "invalid_value"),
    "batch 0": (body(collection={"batch_size": 0}), "/collection/batch_size", "invalid_value"),
    "batch 2^40": (body(collection={"batch_size": 2**40}), "/collection/batch_size", "invalid_value"),
    "damping 1e308": (body(stabilisation={"damping": 1e308}), "/stabilisation/damping", "invalid_value"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_body_is_refused_with_its_place(case: str) -> None:
    raw, pointer, code = CASES[case]
    started = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(DocumentRefused) as refused:
            parse_document(raw)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 1
    assert peak < 50 * 2**20
    first = refused.value.complaints[0]
    if case == "no model":
        assert first.pointer in ("", "/model")
    else:
        assert (first.pointer, first.code) == (pointer, code)
    assert len(refused.value.complaints) <= 20
    assert len(str(refused.value)) < 4_000
    assert "xxxx" not in str(refused.value)
    assert "digits_mlp" not in first.message or code == "invalid_choice"


def test_several_faults_are_named_at_once() -> None:
    raw = b'{"labels": {"a": NaN, "b": [1e999, "\\u0000"], "c/d~": 1' + b"0" * 30 + b"}}"
    with pytest.raises(DocumentRefused) as refused:
        parse_document(raw)
    assert [each.pointer for each in refused.value.complaints] == [
        "/labels/a",
        "/labels/b/0",
        "/labels/b/1",
        "/labels/c~1d~0",
    ]


@pytest.mark.parametrize(
    ("content_type", "encoding", "code"),
    [
        ("text/plain", None, "unsupported_media_type"),
        (None, None, "unsupported_media_type"),
        ("multipart/form-data; boundary=x", None, "unsupported_media_type"),
        ("application/json; charset=utf-16", None, "unsupported_media_type"),
        ("application/jsonx", None, "unsupported_media_type"),
        ("application/json", "gzip", "unsupported_encoding"),
    ],
)
def test_what_is_declared_as_something_else_is_not_read(
    content_type: str | None, encoding: str | None, code: str
) -> None:
    with pytest.raises(DocumentRefused) as refused:
        guard_body(body(), content_type, encoding)
    assert refused.value.complaints[0].code == code


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=UTF-8", "application/json;"])
def test_json_by_any_of_its_names_is_read(content_type: str) -> None:
    guard_body(body(), content_type, "identity")


def test_the_limits_themselves_are_within() -> None:
    deepest = body(labels={}).replace(b'"labels": {}', b'"labels": ' + b"[" * 15 + b"]" * 15)
    guard_body(deepest)
    filled = body()
    guard_body(filled[:-1] + b" " * (MAX_BODY_BYTES - len(filled)) + b"}")
    guard_body(with_seed(str(2**63 - 1)))
    guard_body(body(labels={"brackets": "[" * 100 + '"\\{'}))


def test_a_document_survives_the_way_down_and_up() -> None:
    document = parse_document(body(kind=["factors", "capacity"], labels={"name": "λ"}))
    assert isinstance(document, DOCUMENT)
    stored = document_json(document)
    again = parse_document(json.dumps(stored).encode())
    assert again == document
    assert document_json(again) == stored
    assert sha256_of(document_json(again)) == sha256_of(stored)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from([*GOOD, "collection", "labels", "capacity"]) | st.text(), JSON, max_size=6))
def test_any_object_is_either_a_document_or_refused(value: dict[str, Any]) -> None:
    complaints = None
    try:
        parse_document(json.dumps(GOOD | value).encode())
    except DocumentRefused as refused:
        complaints = refused.complaints
    assert complaints is None or (complaints and all(each.message and each.code for each in complaints))


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200) | st.text(alphabet='{}[]":,\\0e9-NaN \x00é', max_size=200).map(str.encode))
def test_any_bytes_are_refused_in_peace(raw: bytes) -> None:
    with pytest.raises(DocumentRefused):
        parse_document(raw)


def test_a_claim_of_a_million_values_is_refused_before_it_is_built() -> None:
    for value in (b"{},", b"[],", b"1,1,"):
        with pytest.raises(DocumentRefused, match="more than 2,000,000 commas and brackets"):
            parse_claim(b'{"a": [' + value * 1_000_001 + b"1]}")
    assert parse_claim(b'{"a": [[1], {}]}') == {"a": [[1], {}]}
