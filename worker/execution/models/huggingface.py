"""A model of the Hugging Face hub: its plain files fetched at a pinned commit, then read as a folder."""

import os
import re
import shutil
from pathlib import Path

import httpx2
import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from catalog.inputs import HuggingFaceModel, Task
from worker.execution.files.open_files import OpenFolder
from worker.execution.loaded_model import LoadedModel
from worker.execution.loader_context import LoaderContext
from worker.execution.models.checkpoint import load_checkpoint
from worker.execution.refusal import Refusal, Unavailable

_ID = re.compile(r"[A-Za-z0-9][\w.\-]{0,95}(/[A-Za-z0-9][\w.\-]{0,95})?", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][\w.\-/]{0,199}", re.ASCII)
_FILES = ("config.json", "*.safetensors", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json",
          "adapter_config.json", "generation_config.json", "preprocessor_config.json",
          "*_Pooling/config.json")  # fmt: skip


def load(source: HuggingFaceModel, task: Task, context: LoaderContext) -> LoadedModel:
    """Fetch a model of the hub, or find it in the store, and load it as a folder.

    Args:
        source: The model's block of the document.
        task: The task, which decides the head and must suit the architecture.
        context: The loaders' rules, folders and reports.

    Returns:
        The model in ``eval()`` on the host; on the meta device if the context asks for shapes only.

    Raises:
        Refusal: If the model cannot be had, or its checkpoint is not valid.
        Unavailable: If the hub does not answer.
    """
    folder = snapshot(source, context)
    context.log("info", f"{source.id} at commit {folder.name}")
    return load_checkpoint(
        OpenFolder(folder, Path(os.path.realpath(context.store / "hub")), "/model/id"), task, context, "/model/id"
    )


def snapshot(source: HuggingFaceModel, context: LoaderContext) -> Path:
    """Return the folder of one commit of a model, and fetch it into the store if that is allowed.

    Args:
        source: The model's id, and its revision if one is named.
        context: The store; whether the hub may be asked; for shapes only, no weights are fetched.

    Returns:
        The folder, which is named by the commit's hash.

    Raises:
        Refusal: If the id or revision is not valid, or the model is neither in the store nor public on the hub.
        Unavailable: If the hub does not answer.
    """
    if not _ID.fullmatch(source.id):
        raise Refusal("is not a model id; write `owner/name`", pointer="/model/id")
    if source.revision is not None and (not _REVISION.fullmatch(source.revision) or ".." in source.revision):
        raise Refusal("is not a branch, tag or commit", pointer="/model/revision")
    cache = context.store / "hub"
    named = f"{source.id}{f' at {source.revision}' if source.revision else ''}"
    try:
        if not context.offline:
            context.report("model", 0, None, "files")
            if not context.shapes_only:
                _require_room(source, cache)
        return Path(
            huggingface_hub.snapshot_download(
                source.id,
                revision=source.revision,
                cache_dir=cache,
                allow_patterns=[name for name in _FILES if not (context.shapes_only and "safetensors" in name)],
                local_files_only=context.offline,
            )
        )
    except GatedRepoError as error:
        raise Refusal(f"{named} asks for an agreement that was not given here", pointer="/model/id") from error
    except RevisionNotFoundError as error:
        raise Refusal(f"{source.id} has no revision `{source.revision}`", pointer="/model/revision") from error
    except RepositoryNotFoundError as error:
        raise Refusal(f"{source.id} is not on the hub, or not public", pointer="/model/id", code="not_found") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise Refusal(
            f"{named} is not in the model store {cache}, and this machine does not reach the hub; fetch it on a "
            "machine that does, or save it to a folder and take `source: directory`",
            pointer="/model/id",
            code="not_fetched",
        ) from error
    except (HfHubHTTPError, httpx2.HTTPError, ConnectionError, TimeoutError) as error:
        raise Unavailable(
            f"the hub did not answer for {named} ({type(error).__name__}); try again, or take `source: directory`",
            pointer="/model/id",
            code="hub_unreachable",
        ) from error


def _require_room(source: HuggingFaceModel, cache: Path) -> None:
    """Sizes before bytes: refuse what would fill the disk."""
    listed = huggingface_hub.HfApi().model_info(source.id, revision=source.revision, files_metadata=True).siblings or []
    wanted = sum(file.size or 0 for file in listed if file.rfilename.endswith((".safetensors", ".json")))
    if not any(file.rfilename.endswith(".safetensors") for file in listed):
        raise Refusal(f"{source.id} has no safetensors weights; no other format is read", pointer="/model/id")
    cache.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache).free
    if wanted > free * 0.9:
        raise Refusal(f"{source.id} has {wanted:,} bytes; the model store has {free:,} left", pointer="/model/id")
