"""A gradient of one's own: where it may lie, and what it may hold, before a tensor is read."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from worker.execution.job_inputs import load_gradient
from worker.execution.loader_context import LoaderContext
from worker.execution.refusal import Refusal


def context(folder: Path, most_bytes: int = 2**40) -> LoaderContext:
    return LoaderContext(store=folder, directories=(str(folder),), most_bytes=most_bytes)


def test_every_tensor_comes_back_as_it_was_written(tmp_path: Path) -> None:
    written = {"a.weight": torch.randn(3, 2), "a.bias": torch.randn(3, dtype=torch.float64), "s": torch.tensor(2.0)}
    save_file(written, tmp_path / "gradient.safetensors")
    found = load_gradient(str(tmp_path / "gradient.safetensors"), context(tmp_path))
    assert set(found) == set(written)
    assert all(torch.equal(found[name], tensor) for name, tensor in written.items())
    assert found["a.bias"].dtype == torch.float64


def test_a_file_outside_of_what_the_operator_lists_is_refused(tmp_path: Path) -> None:
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    allowed.mkdir()
    other.mkdir()
    save_file({"w": torch.ones(2)}, other / "gradient.safetensors")
    (allowed / "link.safetensors").symlink_to(other / "gradient.safetensors")
    for path in (other / "gradient.safetensors", allowed / "link.safetensors", other / "missing.safetensors"):
        with pytest.raises(Refusal) as refused:
            load_gradient(str(path), context(allowed))
        assert (refused.value.code, refused.value.pointer) == ("not_allowed", "/natural_gradient/gradient/path")


def test_what_is_no_gradient_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "gradient.safetensors"
    with pytest.raises(Refusal, match="does not exist on this machine"):
        load_gradient(str(file), context(tmp_path))
    with pytest.raises(Refusal, match="is a folder; name a"):
        load_gradient(str(tmp_path), context(tmp_path))
    torch.save({"w": torch.ones(2)}, file)
    with pytest.raises(Refusal, match="is a zip archive"):
        load_gradient(str(file), context(tmp_path))
    save_file({"w": torch.ones(2), "steps": torch.ones(2, dtype=torch.int64)}, file)
    with pytest.raises(Refusal, match=r"`steps` of gradient\.safetensors is of type I64") as refused:
        load_gradient(str(file), context(tmp_path))
    assert refused.value.code == "broken_gradient"
    save_file({"w": torch.ones(2**12)}, file)
    with pytest.raises(Refusal, match="16 KiB of tensors, and 4 KiB of host memory") as large:
        load_gradient(str(file), context(tmp_path, most_bytes=2**12))
    assert large.value.code == "budget_exceeded"
