"""Files of a checkpoint's folder that are not read: refused where the model would be another with them, else listed.

An adapter beside weights is refused: ``transformers`` would load another base and apply it. What says how the model is
to be used (pooling, preprocessing of images, more weights than the index names) is a notice: numbers differ by it.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NoReturn

from catalog.requests.inputs import Task
from worker.execution.files.open_files import OpenFile, OpenFolder
from worker.execution.loader_context import LoaderContext
from worker.execution.refusal import Refusal, names, no_constant, unique_keys

_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapters.safetensors",
             "pytorch_lora_weights.safetensors", "adapter.safetensors")  # fmt: skip
TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""What a tokenizer has beside `tokenizer.json`."""
_READ = frozenset({"config.json", "tokenizer.json", *TOKENIZER_FILES})
_DATA = (".json", ".jsonl", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".npz",
         ".model", ".txt", ".jinja", ".pkl", ".index")  # fmt: skip
_WHOLE = "model.safetensors"
_MOST_FOLDERS = 64
_MOST_CONFIG_BYTES = 2**20
_POOLING = "pooling_mode_"
_MOST_STEPS = 32
_STEP = re.compile(r"sentence_transformers\.([a-z_]+\.){0,8}([A-Za-z]{1,60})", re.ASCII)
_OWN_STEPS = frozenset({"Transformer", "Pooling"})
"""Steps of a sentence encoder that are those of the task; how it pools stands in a file of its own."""


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

    ``applied`` is the folder of the adapter that is applied, which may be one below.
    """
    read = _READ | set(weights)
    for name in list_data_files(folder):
        if name in read:
            continue
        context.unused(f"file {names([name])}")
        if name.endswith(".safetensors"):
            why = (
                f"`{_WHOLE}` is read by itself, as transformers does"
                if _WHOLE in read
                else "the checkpoint's index does not name it"
            )
            context.notice(f"the tensors of {names([name])} are not read: {why}")
        elif name == "preprocessor_config.json" and images:
            context.notice(
                "`preprocessor_config.json` is not applied: images go into the model as the data give them, so scale "
                "and normalise them beforehand"
            )
        elif name == "modules.json" and task.type == "sentence_embedding":
            _tell_further_steps(folder.file(name), context)
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


def _tell_further_steps(file: OpenFile | None, context: LoaderContext) -> None:
    """Say which steps a sentence encoder has besides those of the task."""
    value = _read(file)
    steps = [each.get("type") if isinstance(each, dict) else None for each in value] if isinstance(value, list) else []
    types = [each for each in steps if isinstance(each, str)]
    if not 1 <= len(types) == len(steps) <= _MOST_STEPS:
        context.notice(
            f"`modules.json` is not a list of 1 to {_MOST_STEPS} steps, each with a `type`, so it is not known what "
            "the encoder does besides; `sentence_embedding` measures the mean over the tokens that are not padding"
        )
        return
    known = [(each, _STEP.fullmatch(each)) for each in types]
    further = [match[2] if match else each for each, match in known if not match or match[2] not in _OWN_STEPS]
    if further:
        context.notice(
            f"the model's own {names(further)}, a step in `modules.json`, is not applied: `sentence_embedding` "
            "measures the mean itself, over the tokens that are not padding"
        )


def _other_pooling(file: OpenFile | None) -> str | None:
    """Return a sentence encoder's pooling where it is another than the mean; None where it is the mean."""
    value = _read(file)
    if not isinstance(value, dict):
        return "a pooling that cannot be read (it is not one JSON object with each key once)"
    chosen = [key for key, on in value.items() if on is True and key.startswith(_POOLING)]
    if value.get("pooling_mode") not in (None, "mean"):
        return f"`pooling_mode: {str(value['pooling_mode'])[:40]}`"
    return None if chosen in ([], [f"{_POOLING}mean_tokens"]) else f"the pooling {names(chosen)}"


def read_settings(file: OpenFile, most_bytes: int, refuse: Callable[[str], NoReturn]) -> dict[str, Any]:
    """Return the one JSON object of a file of settings; ``refuse`` is told what is wrong with it."""
    if file.stat().st_size > most_bytes:
        refuse(f"has {file.stat().st_size:,} bytes; at most {most_bytes:,} are read")
    try:
        value = json.loads(file.read_bytes(), parse_constant=no_constant, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        refuse(str(error) if str(error).startswith("two fields") else "is not valid JSON (NaN and Infinity are not)")
    if not isinstance(value, dict):
        refuse("is not a JSON object")
    return value


def _read(file: OpenFile | None) -> Any:  # noqa: ANN401 - decoded from JSON
    """Return the value that a file holds; None where it holds none, or is too large."""
    if file is None or file.stat().st_size > _MOST_CONFIG_BYTES:
        return None
    try:
        return json.loads(file.read_bytes(), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError):
        return None
