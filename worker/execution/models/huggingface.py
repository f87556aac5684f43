"""A model of the Hugging Face hub: its plain files fetched at a pinned commit, then read as a folder."""

from catalog.requests.inputs import HuggingFaceModel, Task
from worker.execution.loaded_model import LoadedModel
from worker.execution.loader_context import LoaderContext
from worker.execution.models.adapters.adapter import open_adapter
from worker.execution.models.checkpoint import load_checkpoint
from worker.execution.models.hub_store import open_snapshot, snapshot


def load(source: HuggingFaceModel, task: Task, context: LoaderContext) -> LoadedModel:
    """Fetch a model of the hub, or find it in the store, and load it as a folder."""
    folder = snapshot(source, context)
    context.log("info", f"{source.id} at commit {folder.name}")
    adapter = open_adapter(source, f"{source.id} at commit {folder.name}", context)
    return load_checkpoint(open_snapshot(folder, context, "/model/id"), task, context, "/model/id", adapter)
