"""The reference pages of `docs/`, made from the program itself: command line, REST interface, job document."""

import html
import re
from collections.abc import Iterator, Mapping
from typing import Any

import typer.main
from pydantic import TypeAdapter
from typer.cli import get_docs_for_click

from api.main import create_app
from api.requests.openapi import document_schema, error_responses
from api.settings import Settings
from catalog import DOCUMENT
from jobs.settings import LedgerSettings
from kronoscope.cli.main import app

_GENERATED = "<!-- Generated: .venv/bin/python -P tests/test_documentation.py -->\n\n"
_EPILOG = re.compile(r"^Exit codes: .*?(?=^(?:##|\*\*)|\Z)", re.DOTALL | re.MULTILINE)


def command_line_page() -> str:
    """Return the page of every command, its arguments and options, from the help texts."""
    command = typer.main.get_command(app)
    text = html.unescape(get_docs_for_click(obj=command, ctx=typer.Context(command), name="kronoscope"))
    text = text.replace("```console\n$ ", "```text\n")
    epilog = _EPILOG.search(text)
    assert epilog is not None
    first, rest = text[: epilog.end()], text[epilog.end() :]
    head, _, body = first.partition("\n\n")
    del head
    return f"# Command line\n\n{_GENERATED}{body}{_EPILOG.sub('', rest)}".rstrip() + "\n"


def rest_page() -> str:
    """Return the page of every route: parameters, body, answers, from the OpenAPI document."""
    document = create_app(Settings(ledger=LedgerSettings(database_url="sqlite://"), embedded=True)).openapi()
    common = {status: answer["description"] for status, answer in error_responses().items()}
    lines = [
        "# REST interface",
        "",
        _GENERATED.strip(),
        "",
        "The same as OpenAPI, with every schema: `/openapi.json` of a running service.",
        "Errors are `application/problem+json` (RFC 9457): `title`, `detail`, and `errors` that name field, value and",
        "remedy. Any route that takes a key may answer, besides what it lists:",
        "",
        "| status | meaning |",
        "|---|---|",
        *(f"| {status} | {meaning} |" for status, meaning in common.items()),
    ]
    for path, methods in sorted(document["paths"].items()):
        for method, operation in methods.items():
            lines += ["", *_operation(method.upper(), path, operation)]
    return "\n".join(lines) + "\n"


def document_page() -> str:
    """Return the page of every field of a job document, from its schema."""
    schema = document_schema()
    lines = [
        "# Job document",
        "",
        _GENERATED.strip(),
        "",
        "What `POST /v1/jobs`, `kronoscope submit` and `kronoscope run` take, as JSON or YAML. Unknown fields are",
        "refused. The block of an analysis that `kind` does not name is checked and stored, and has no effect.",
        "",
        *_fields(schema),
    ]
    for name, record in sorted(schema["$defs"].items()):
        lines += ["", f"## {name}", "", _plain(record.get("description", "")), "", *_fields(record)]
    return "\n".join(lines) + "\n"


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {method} {path}"
    yield ""
    yield f"{operation['summary']}. {_plain(operation.get('description', ''))}".strip()
    parameters = [each for each in operation.get("parameters", []) if each["in"] != "cookie"]
    if parameters:
        yield from ("", "| parameter | in | type | meaning |", "|---|---|---|---|")
    for each in parameters:
        required = " (required)" if each.get("required") else ""
        meaning = _plain(each.get("description") or each["schema"].get("description", ""))
        yield f"| `{each['name']}`{required} | {each['in']} | {_type(each['schema'])} | {_cell(meaning)} |"
    if "requestBody" in operation:
        body = operation["requestBody"]
        media = ", ".join(f"`{name}`" for name in body["content"])
        yield from ("", f"Body: {media}. {_plain(body.get('description', ''))}".rstrip())
    yield from ("", "| status | meaning | content |", "|---|---|---|")
    common = {str(status) for status in error_responses()}
    for status, answer in sorted(operation["responses"].items()):
        if status in common:
            continue
        content = ", ".join(_content(*each) for each in answer.get("content", {}).items())
        yield f"| {status} | {_cell(_plain(answer['description']))} | {content or 'none'} |"


def _fields(record: Mapping[str, Any]) -> Iterator[str]:
    yield from ("| field | type | default | meaning |", "|---|---|---|---|")
    required = record.get("required", [])
    for name, field in record.get("properties", {}).items():
        default = "required" if name in required else _default(field)
        yield f"| `{name}` | {_type(field)} | {default} | {_cell(_plain(field.get('description', '')))} |"


def _default(field: Mapping[str, Any]) -> str:
    if "const" in field:
        return f"`{field['const']}`"
    value = field.get("default")
    if value is None:
        return "none"
    if isinstance(value, (dict, list)):
        return "its own defaults" if isinstance(value, dict) else f"`{value}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})" if name in TypeAdapter(DOCUMENT).json_schema()["$defs"] else name
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return " or ".join(f"`{each}`" for each in schema["enum"])
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        return " or ".join(_type(each) for each in choices if each.get("type") != "null")
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(kind)


def _content(media: str, content: Mapping[str, Any]) -> str:
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    return f"`{media}`" + (f" {name}" if name else "")


def _plain(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
