"""The store of models of the Hugging Face hub: the folder of one commit of a model or an adapter."""

import os
import re
from pathlib import Path

import huggingface_hub.constants
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from catalog.requests.inputs import HuggingFaceModel
from worker.execution.files.open_files import OpenFolder
from worker.execution.loader_context import LoaderContext
from worker.execution.models.hub_snapshot import FILES, fetch_snapshot
from worker.execution.refusal import Refusal

_ID = re.compile(r"[A-Za-z0-9][\w.\-]{0,95}(/[A-Za-z0-9][\w.\-]{0,95})?", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][\w.\-/]{0,199}", re.ASCII)


def snapshot(source: HuggingFaceModel, context: LoaderContext) -> Path:
    """Return the folder of one commit of a model, and fetch it into the store if that is allowed."""
    if not _ID.fullmatch(source.id):
        raise Refusal("is not a model id; write `owner/name`", pointer="/model/id")
    if source.revision is not None and (not _REVISION.fullmatch(source.revision) or ".." in source.revision):
        raise Refusal("is not a branch, tag or commit", pointer="/model/revision")
    if not context.offline and not huggingface_hub.constants.is_offline_mode():
        context.report("model", 0, None, "files")
        return fetch_snapshot(source, context)
    cache = context.store / "hub"
    named = f"{source.id}{f' at {source.revision}' if source.revision else ''}"
    try:
        return Path(
            huggingface_hub.snapshot_download(
                source.id,
                revision=source.revision,
                cache_dir=cache,
                allow_patterns=[name for name in FILES if not (context.shapes_only and "safetensors" in name)],
                local_files_only=True,
            )
        )
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise Refusal(
            f"{named} is not in the model store {cache}, and this machine does not reach the hub; fetch it on a "
            "machine that does, or save it to a folder and take `source: directory`",
            pointer="/model/id",
            code="not_fetched",
        ) from error


def open_snapshot(folder: Path, context: LoaderContext, pointer: str) -> OpenFolder:
    """Open the folder of a commit, whose files lie in the store."""
    return OpenFolder(folder, Path(os.path.realpath(context.store / "hub")), pointer)
