"""Files of a checkpoint's folder that are not read: refused where the model would be another with them, else listed.

An adapter beside weights is refused: ``transformers`` would load another base and apply it. What says how the model is
to be used (pooling, preprocessing of images, more weights than the index names) is a notice: numbers differ by it.
"""

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from catalog.requests.inputs import Task
from worker.execution.files.open_files import OpenFile, OpenFolder
from worker.execution.loader_context import LoaderContext
from worker.execution.refusal import Refusal, names

_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapters.safetensors",
             "pytorch_lora_weights.safetensors", "adapter.safetensors")  # fmt: skip
_READ = frozenset({"config.json", "tokenizer.json", "tokenizer_config.json"})
_DATA = (".json", ".jsonl", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".npz",
         ".model", ".txt", ".jinja", ".pkl", ".index")  # fmt: skip
_MOST_FOLDERS = 64
_MOST_CONFIG_BYTES = 2**20
_POOLING = "pooling_mode_"


def require_no_adapter(folder: OpenFolder, pointer: str) -> None:
    """Refuse a folder with an adapter, which would have to be applied to the weights."""
    found = [name for name in folder.names() if name.lower() in _ADAPTERS]
    if found:
        raise Refusal(
            f"{names(found)} belong to an adapter, which is not applied, so that another model would be measured; "
            "move it into a folder of its own and name that in `model.adapter`, beside the base's `path` or `id`; or "
            "merge it into the weights (`merge_and_unload` of peft, then `save_pretrained`)",
            pointer=pointer,
            code="adapter",
        )


def list_data_files(folder: OpenFolder) -> list[str]:
    """Return the names of a folder's files that may hold data or settings."""
    return [name for name in folder.names() if name.lower().endswith(_DATA)]


def list_unused_files(
    folder: OpenFolder,
    weights: Iterable[str],
    task: Task,
    context: LoaderContext,
    *,
    images: bool,
    applied: Path | None = None,
) -> None:
    """List the files of a folder that are not read, with notices of those that would change numbers.

    Args:
        weights: Names of the files that hold the weights.
        images: Whether the model takes images.
        applied: The folder of the adapter that is applied, which may be one below.
    """
    read = _READ | set(weights)
    for name in list_data_files(folder):
        if name in read:
            continue
        context.unused(f"file {names([name])}")
        if name.endswith(".safetensors"):
            context.notice(f"the tensors of {names([name])} are not read: the checkpoint's index does not name it")
        elif name == "preprocessor_config.json" and images:
            context.notice(
                "`preprocessor_config.json` is not applied: images go into the model as the data give them, so scale "
                "and normalise them beforehand"
            )
    for name in [each for each in folder.names() if "." not in each.lstrip(".")][:_MOST_FOLDERS]:
        if folder.path / name != applied:
            _list_subfolder(name, folder.folder(name), read, task, context)


def _list_subfolder(name: str, folder: OpenFolder, read: Collection[str], task: Task, context: LoaderContext) -> None:
    within = [each for each in list_data_files(folder) if f"{name}/{each}" not in read]
    if not within:
        return
    if name.endswith("_Pooling") and within == ["config.json"] and task.type == "sentence_embedding":
        other = _other_pooling(folder.file("config.json"))
        if other is None:
            return
        context.notice(
            f"`{name}/config.json` asks for {other}, and `sentence_embedding` measures the mean over the tokens that "
            "are not padding"
        )
    elif any(each.lower() in _ADAPTERS for each in within):
        context.notice(f"the adapter in the folder {names([name])} is not applied")
    elif any(each.endswith((".safetensors", ".bin")) for each in within):
        context.notice(f"the weights in the folder {names([name])} are not part of the model that is measured")
    for each in within:
        context.unused(f"file {names([f'{name}/{each}'])}")


def _other_pooling(file: OpenFile | None) -> str | None:
    """Return a sentence encoder's pooling where it is another than the mean; None where it is the mean."""
    value = _read(file)
    chosen = [key for key, on in value.items() if on is True and key.startswith(_POOLING)]
    if value.get("pooling_mode") not in (None, "mean"):
        return f"`pooling_mode: {str(value['pooling_mode'])[:40]}`"
    return None if chosen in ([], [f"{_POOLING}mean_tokens"]) else f"the pooling {names(chosen)}"


def _read(file: OpenFile | None) -> dict[str, Any]:
    if file is None or file.stat().st_size > _MOST_CONFIG_BYTES:
        return {}
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
