import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from catalog.requests.inputs import ModelFactory, Task
from worker.execution.loader_context import LoaderContext
from worker.execution.models.factory import load
from worker.execution.refusal import Refusal

pytestmark = pytest.mark.usefixtures("import_path")


def loaded(tmp_path: Path, factory: str, kwargs: Any = None, **around: Any) -> Any:
    context = LoaderContext(store=tmp_path, paths=(tmp_path,), **around)
    source = ModelFactory(source="factory", factory=factory, kwargs=kwargs or {})
    return load(source, Task(type="regression"), context)


def test_a_factory_of_the_callers_folder_is_found_last(tmp_path: Path) -> None:
    (tmp_path / "kronoscope_test_mine.py").write_text(
        "import torch\ndef make(n): return torch.nn.Linear(n, 1).train()\n"
    )
    model = loaded(tmp_path, "kronoscope_test_mine:make", {"n": 4}).model
    assert isinstance(model, torch.nn.Linear)
    assert not model.training
    assert sys.path[-1] == str(tmp_path)


def test_an_installed_callable_needs_no_path(tmp_path: Path) -> None:
    assert loaded(tmp_path, "torch.nn:Linear", {"in_features": 2, "out_features": 1}).model.in_features == 2


@pytest.mark.parametrize("name", ["engine", "worker", "torch", "json", "numpy"])
def test_a_module_that_would_be_hidden_is_said_to_be(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("def make(): return None\n")
    with pytest.raises(Refusal, match=rf"`{name}` in .*rename yours") as refused:
        loaded(tmp_path, f"{name}:make")
    assert refused.value.code == "name_clash"
    assert refused.value.pointer == "/model/factory"


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("kronoscope_test_absent:make", "`kronoscope_test_absent` was not found"),
        ("kronoscope_test_faulty:absent", "has no `absent`"),
        ("kronoscope_test_faulty:number", "holds no callable `number`"),
        ("kronoscope_test_faulty:raises", "raised RuntimeError: no weights here"),
        ("kronoscope_test_faulty:leaves", "raised SystemExit: 2"),
        ("kronoscope_test_faulty:wrong", "returned dict; it must return a torch.nn.Module"),
        ("kronoscope_test_broken:make", "raised ZeroDivisionError"),
    ],
)
def test_what_is_wrong_with_a_factory_is_said(tmp_path: Path, factory: str, said: str) -> None:
    (tmp_path / "kronoscope_test_faulty.py").write_text(
        "number = 3\ndef raises(): raise RuntimeError('no weights here')\ndef wrong(): return {}\n"
        "def leaves(): raise SystemExit(2)\n"
    )
    (tmp_path / "kronoscope_test_broken.py").write_text("1 / 0\n")
    with pytest.raises(Refusal) as refused:
        loaded(tmp_path, factory)
    assert said in refused.value.message
    assert refused.value.pointer == "/model/factory"


@pytest.mark.parametrize("name", ["a\ud800b", "a\0b"])
def test_a_layer_whose_name_cannot_be_stored_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "kronoscope_test_names.py").write_text(
        "import torch\ndef make(name):\n    model = torch.nn.Module()\n"
        "    model._modules[name] = torch.nn.Linear(1, 1)\n    return model\n"
    )
    with pytest.raises(Refusal, match="rename those modules") as refused:
        loaded(tmp_path, "kronoscope_test_names:make", {"name": name})
    assert refused.value.code == "invalid_name"


def test_only_listed_factories_are_called_in_a_service(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="not listed"):
        loaded(tmp_path, "torch.nn:Linear", factories=("torch.nn:Identity",))
    assert loaded(tmp_path, "torch.nn:Identity", factories=("torch.nn:Identity",)).model is not None
