"""Fetch a model of the hub into the model store: the one step of a service that reaches outside.

    python -P -m worker.execution.models.fetch OWNER/NAME [--revision COMMIT] [--store DIR]

Config, safetensors weights and tokenizer only, at one commit; workers read them offline.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from catalog.requests.inputs import HuggingFaceModel
from worker.execution.loader_context import LoaderContext
from worker.execution.models.hub_store import snapshot
from worker.execution.refusal import Refusal


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch one model of the hub into the store."""
    parser = argparse.ArgumentParser(prog="fetch", description="Put a model of the hub into the model store.")
    parser.add_argument("id", metavar="OWNER/NAME", help="the model on the hub")
    parser.add_argument("--revision", help="a branch, tag or commit; pinned to the commit it names now")
    parser.add_argument("--store", type=Path, help="the model store; default KRONOSCOPE_MODEL_STORE")
    chosen = parser.parse_args(arguments)
    store = chosen.store or Path(os.environ.get("KRONOSCOPE_MODEL_STORE") or ".kronoscope/models")
    source = HuggingFaceModel(source="huggingface", id=chosen.id, revision=chosen.revision)
    try:
        folder = snapshot(source, LoaderContext(store=store.absolute(), offline=False))
    except Refusal as refusal:
        sys.stderr.write(f"{refusal.message}\n")
        return 3 if refusal.category == "transient" else 2
    except OSError as error:
        sys.stderr.write(f"the model store {store} cannot be written ({error.strerror or error}); nothing was kept\n")
        return 2
    sys.stdout.write(f"{source.id} is in the store at commit {folder.name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
