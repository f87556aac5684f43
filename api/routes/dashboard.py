"""The dashboard's files, read once from the package and served by exact path without a key."""

import dataclasses
import hashlib
import json
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Annotated, Any

from fastapi import APIRouter, Header, Response

import api
from api.problem_details import not_found
from api.requests.auth import open_to_all
from api.requests.etags import has_current
from catalog import ANALYSES
from catalog.analyses.analysis import Column, Figure
from catalog.record import record

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


@record
class PageFile:
    """One file of the dashboard."""

    content: bytes
    media_type: str
    etag: str


def _read(folder: Traversable, prefix: str = "") -> dict[str, PageFile]:
    """Return the files of a folder and its subfolders by their path below the page's folder."""
    files = {}
    for entry in folder.iterdir():
        media_type = _TYPES.get(entry.name.rpartition(".")[2])
        if entry.is_dir():
            files.update(_read(entry, f"{prefix}{entry.name}/"))
        elif media_type is not None:
            files[prefix + entry.name] = _page_file(entry.read_bytes(), media_type)
    return files


def _page_file(content: bytes, media_type: str) -> PageFile:
    return PageFile(content=content, media_type=media_type, etag=f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def analyses_script() -> bytes:
    """Return the script that holds what the page shows of each analysis."""
    shown = {
        kind: {
            "title": analysis.title,
            "columns": [_stated(column) for column in analysis.columns if column.heading],
            "figures": [_stated(figure) for figure in analysis.figures if figure.name],
            "damped": analysis.damped,
            "unit": analysis.unit,
            "collects": analysis.collects,
            "opens": analysis.opens,
        }
        for kind, analysis in ANALYSES.items()
    }
    return f"export const ANALYSES = {json.dumps(shown, ensure_ascii=False)};\n".encode()


def _stated(item: Column | Figure) -> dict[str, Any]:
    values = ((field, getattr(item, field.name)) for field in dataclasses.fields(item))
    return {field.name: value for field, value in values if value != field.default and field.name not in _OF_TERMINALS}


_OF_TERMINALS = ("short", "line", "joined")
# requests are looked up here and never on the disk, so that no path can leave the folder
_FILES = _read(resources.files(api).joinpath("dashboard"))
_FILES["scripts/analyses.js"] = _page_file(analyses_script(), _TYPES["js"])

router = APIRouter(include_in_schema=False)

Known = Annotated[str | None, Header()]


@router.get("/")
@open_to_all
async def index(if_none_match: Known = None) -> Response:
    """The dashboard's page, as HTML."""
    return _serve("index.html", if_none_match)


@router.get("/docs")
@open_to_all
async def reference(if_none_match: Known = None) -> Response:
    """The REST API to read and to try, as HTML; the schema that it shows asks for a key."""
    return _serve("reference.html", if_none_match)


@router.get("/dashboard/{name:path}")
@open_to_all
async def part(name: str, if_none_match: Known = None) -> Response:
    """A script, a style sheet or the icon of the dashboard."""
    return _serve(name, if_none_match)


def _serve(name: str, if_none_match: str | None) -> Response:
    file = _FILES.get(name)
    if file is None:
        raise not_found()
    headers = {"etag": file.etag, "cache-control": "no-cache"}
    if has_current(if_none_match, file.etag):
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)
