"""List the architectures that the installed transformers implements itself, for review, into the repository.

    python -P -m ops.list_architectures [--check]

Each `model_type` has its configuration class, the heads that transformers has for it, and the older names of fields
that this class still takes. Left out, with the reason, are those that load further parts as they are built, start a
program, or need a package that the worker does not have: the source is read for calls that do, and every architecture
is built once from its defaults, on the meta device, under an audit hook. A newer transformers changes nothing until
somebody runs this and reviews what it wrote. `--check` compares, and writes nothing. It takes three minutes.
"""

import argparse
import ast
import functools
import inspect
import json
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import (
    CONFIG_MAPPING,
    CONFIG_MAPPING_NAMES,
    model_type_to_module_name,
)

from worker.execution.models.architectures.config_fields import declared_fields
from worker.execution.models.architectures.model_types import HEADS, LIST

_LOADING = {"load_backbone", "from_pretrained", "create_model", "requires_backends", "cached_file", "hf_hub_download",
            "consolidate_backbone_kwargs_to_config"}  # fmt: skip
_OLDER = re.compile(r"""kwargs\.(?:pop|get|setdefault)\(\s*["'](\w+)["']""")
_OPTIONAL = re.compile(r"""getattr\(\s*(?:self\.)?config,\s*["'](\w+)["']""")
_NOT_READ = re.compile(
    r"""\w*backbone\w*|\w*_config|\w*_config_dict|config|token|revision|cache_dir|local_files_only|trust_remote_code
    |\w*dtype|model_type|per_layer_config|\w*_implementation|num_labels|output_attentions|proxies|force_download|repo_id
    |commit_message|code_revision|subfolder|name_or_path|return_unused_kwargs|out_(features|indices)|rope_scaling
    |initializer_range|_\w+|is_decoder|is_encoder_decoder|add_cross_attention|use_cache|gradient_checkpointing
    |torchscript|output_hidden_states|tie_word_embeddings|pad_token_id|encoder|decoder""",
    re.VERBOSE,
)
_HIDDEN_BY_FIELD = re.compile(r"is_causal=(self\.)?config\.is_decoder")
_FORBIDDEN = ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.system")
_SECONDS = 60
_MODELS = Path(transformers.__file__).parent / "models"


class TooSlow(BaseException):
    """A model took longer to build than it may."""


def _give_up(_: int, __: FrameType | None) -> None:
    raise TooSlow


def heads(model_type: str) -> list[str]:
    """Return the heads that transformers has for a type."""
    return [
        head
        for head, auto in HEADS.items()
        if model_type in getattr(transformers, auto)._model_mapping._model_mapping  # noqa: SLF001 - names, nothing is loaded
    ]


def is_next_token_seen(model_type: str) -> bool:
    """Return whether a type's head for the next token sees it, as that of an encoder does.

    Only `is_decoder`, which is not read, or an `attn_type` other than the default would hide it.
    """
    kind = CONFIG_MAPPING[model_type]
    directions = declared_fields(kind).get("attn_type")
    paths = _MODELS.glob(f"{model_type_to_module_name(model_type)}/modeling_*.py")
    encodes = (
        "masked_lm" in heads(model_type)
        or (directions is not None and directions.default == "bi")
        or any(_HIDDEN_BY_FIELD.search(path.read_text()) for path in paths)
    )
    # some classes have no defaults that fit together
    return encodes and not kind().is_encoder_decoder


@functools.cache
def loading_calls(module: str) -> str:
    """Return the calls in the constructors of a module's classes that load further parts, losses left out."""
    found = set()
    for path in [*_MODELS.glob(f"{module}/modeling_*.py"), *_MODELS.glob(f"{module}/configuration_*.py")]:
        for owner in ast.walk(ast.parse(path.read_text())):
            if isinstance(owner, ast.ClassDef) and not owner.name.endswith("Loss"):
                found |= set(_calls(owner))
    return ", ".join(sorted(found))


def _calls(owner: ast.ClassDef) -> Iterator[str]:
    for method in owner.body:
        if isinstance(method, ast.FunctionDef) and method.name in ("__init__", "__post_init__"):
            for node in ast.walk(method):
                if isinstance(node, ast.Call):
                    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                    if name in _LOADING:
                        yield name


def older_names(kind: type) -> list[str]:
    """Return the names that a configuration's class, or its model's rotary embedding, reads besides the fields."""
    found: set[str] = set()
    for each in kind.__mro__:
        if each.__module__.startswith("transformers.models."):
            found |= set(_OLDER.findall(inspect.getsource(each)))
    for path in _MODELS.glob(f"{kind.__module__.split('.')[2]}/modeling_*.py"):
        source = path.read_text()
        found |= set(_OPTIONAL.findall(source))
        if "partial_rotary_factor" in source:
            found.add("partial_rotary_factor")
    return sorted(name for name in found - set(declared_fields(kind)) if not _NOT_READ.fullmatch(name))


class Watch:
    """An audit hook that keeps what reaches out of the process while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.seen: set[str] = set()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, _: Any) -> None:  # noqa: ANN401 - whatever the event has
        if self.on and event.startswith(_FORBIDDEN):
            self.seen.add(event)


def reason_left_out(model_type: str, found: list[str], watch: Watch) -> str | None:
    """Return why an architecture cannot be served; None if it can, or if its defaults alone build none."""
    calls = loading_calls(model_type_to_module_name(model_type))
    if calls:
        return f"its constructor calls {calls}"
    if not found:
        return None
    head = "model" if "model" in found else found[0]
    watch.seen.clear()
    signal.alarm(_SECONDS)
    watch.on = True
    try:
        with torch.device("meta"):
            getattr(transformers, HEADS[head]).from_config(CONFIG_MAPPING[model_type]())
    except ImportError as error:
        missing = re.search(r"requires the (\w+) library", str(error))
        return f"it needs the package {missing[1] if missing else str(error)[:80]}"
    except TooSlow:
        return f"its defaults take more than {_SECONDS} s to build"
    except Exception as error:  # noqa: BLE001 - defaults that describe no model say nothing of a whole config.json
        sys.stderr.write(f"{model_type}: the defaults build none ({type(error).__name__}: {str(error)[:100]})\n")
    finally:
        watch.on = False
        signal.alarm(0)
    return f"it reaches out as it is built ({', '.join(sorted(watch.seen))})" if watch.seen else None


def described() -> dict[str, Any]:
    """Return the whole list."""
    watch = Watch()
    signal.signal(signal.SIGALRM, _give_up)
    types: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for model_type in sorted(CONFIG_MAPPING_NAMES):
        kind, found = CONFIG_MAPPING[model_type], heads(model_type)
        if "causal_lm" in found and is_next_token_seen(model_type):
            found.remove("causal_lm")
        reason = reason_left_out(model_type, found, watch)
        if reason is not None:
            left_out[model_type] = reason
        else:
            types[model_type] = {"config": kind.__name__, "heads": found, "older": older_names(kind)}
    return {"transformers": transformers.__version__, "left_out": left_out, "types": types}


def text_of(listed: dict[str, Any]) -> str:
    """Return the list as its file has it, a line for each type."""
    lines = ["{", f'"transformers": {json.dumps(listed["transformers"])},']
    for name, closing in (("left_out", "},"), ("types", "}")):
        rows = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in listed[name].items()]
        lines += [f'"{name}": {{', ",\n".join(rows), closing]
    return "\n".join([*lines, "}"]) + "\n"


def main() -> None:
    """Write the list, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the repository's, and write nothing")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    text = text_of(described())
    if not options.check:
        LIST.write_text(text)
    elif LIST.read_text() != text:
        sys.exit(f"{LIST} is not what the installed transformers {transformers.__version__} has; review and write it")


if __name__ == "__main__":
    main()
