"""Image splits: read by class and index, never whole, and refused where files are not what they must be."""

import json
import math
import os
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from catalog.requests.data_sources import ImageSplits
from engine.image_data import SPLITS, ImageData
from engine.memory.budget import resident_bytes
from worker.execution.data.images import image_splits
from worker.execution.data.images.image_splits import load
from worker.execution.files.open_files import OpenFile
from worker.execution.loader_context import LoaderContext
from worker.execution.refusal import Refusal

SHAPE = (3, 6, 4)
PER_CLASS = 5


def split_tensors(place: int) -> dict[str, Tensor]:
    """Images and labels of one split: three classes, whose images lie in a mixed order."""
    generator = torch.Generator().manual_seed(place)
    count = 3 * PER_CLASS
    labels = (torch.arange(count) % 3 + 10 * place)[torch.randperm(count, generator=generator)]
    images = torch.randint(256, (count, *SHAPE), generator=generator, dtype=torch.uint8)
    return {"images": images, "labels": labels}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "splits").mkdir()
    for place, split in enumerate(SPLITS):
        save_file(split_tensors(place), tmp_path / "splits" / f"{split}.safetensors")
    return tmp_path / "splits"


def opened(folder: Path, **options: Any) -> ImageData:
    context = LoaderContext(**{"store": folder, "directories": (str(folder),), **options})
    return load(ImageSplits(source="image_splits", path=str(folder)), context)


def refused(folder: Path, **options: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        opened(folder, **options)
    assert caught.value.pointer == "/data/path"
    return caught.value


def test_images_are_read_by_class_and_index(folder: Path) -> None:
    data = opened(folder)
    assert data.shape == SHAPE
    for place, split in enumerate(SPLITS):
        truth, images = split_tensors(place), data.splits[split]
        assert list(images.names) == [str(10 * place + each) for each in range(3)]
        assert list(images.sizes) == [PER_CLASS] * 3
        for label in range(3):
            expected = truth["images"][truth["labels"] == 10 * place + label]
            assert torch.equal(images.read(label, range(PER_CLASS)), expected)
            assert torch.equal(images.read(label, [4, 0, 4]), expected[[4, 0, 4]])
        assert images.held_bytes == 0


def test_no_file_is_read_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the images no more is asked for at once than a chunk, and by an episode no more than it takes."""
    asked: list[int] = []
    read_at = OpenFile.read_at

    def counted(file: OpenFile, begin: int, count: int) -> bytearray:
        if count != 8 * 3 * PER_CLASS:  # the labels
            asked.append(count // (3 * 6 * 4))
        return read_at(file, begin, count)

    monkeypatch.setattr(OpenFile, "read_at", counted)
    monkeypatch.setattr(image_splits, "_CHUNK_BYTES", 4 * 3 * 6 * 4)
    data = opened(folder)
    # the digest alone reads every image, four at a time
    assert max(asked) == 4
    assert sum(asked) == 3 * 3 * PER_CLASS
    del asked[:]
    data.splits["train"].read(1, [0, 3])
    assert asked == [1, 1]
    del asked[:]
    # a plan reads none
    assert opened(folder, shapes_only=True).sha256 == ""
    assert asked == []


def test_the_digest_is_of_images_and_labels(folder: Path, tmp_path: Path) -> None:
    first = opened(folder).sha256
    assert first == opened(folder).sha256
    for changed in ("images", "labels"):
        tensors = split_tensors(2)
        if changed == "images":
            tensors["images"][0, 0, 0, 0] ^= 1
        else:
            tensors["labels"][0] = 99
        save_file(tensors, folder / "test.safetensors")
        assert opened(folder).sha256 != first
    save_file(split_tensors(2), folder / "test.safetensors")
    assert opened(folder).sha256 == first


def test_the_digest_says_which_image_has_which_label(folder: Path) -> None:
    first = opened(folder).sha256
    tensors = split_tensors(2)
    labels = tensors["labels"]
    other = int((labels != labels[0]).nonzero()[0])
    labels[[0, other]] = labels[[other, 0]]
    save_file(tensors, folder / "test.safetensors")
    swapped = opened(folder)
    assert list(swapped.splits["test"].sizes) == [PER_CLASS] * 3
    assert swapped.sha256 != first


def test_the_digest_is_the_same_in_chunks_of_any_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(folder).sha256
    monkeypatch.setattr(image_splits, "_CHUNK_BYTES", 1)
    assert opened(folder).sha256 == first


def changed(**tensors: Tensor | None) -> Callable[[Path], None]:
    """Write the test split with other tensors; None leaves one out."""

    def write(folder: Path) -> None:
        kept = {name: each for name, each in {**split_tensors(2), **tensors}.items() if each is not None}
        save_file(kept, folder / "test.safetensors")

    return write


def images_of(dtype: torch.dtype = torch.uint8, *shape: int) -> Tensor:
    return torch.ones(shape or (15, *SHAPE), dtype=dtype)


def written(content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "test.safetensors").write_bytes(content)


def headed(header: dict[str, Any], data: bytes = b"") -> Callable[[Path], object]:
    text = json.dumps(header).encode()
    return written(len(text).to_bytes(8, "little") + text + data)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file": (
        lambda folder: (folder / "test.safetensors").unlink(),
        r"no test\.safetensors; give one file of `images` and `labels` for each of train, validation, test",
    ),
    "no images": (changed(images=None), r"test\.safetensors holds no `images`; save uint8 \(N, channels, rows, col"),
    "no labels": (changed(labels=None), r"test\.safetensors holds no `labels`; save int64 \(N,\) under that name"),
    "floats": (changed(images=images_of(torch.float32)), r"`images` of type F32 and shape \[15, 3, 6, 4\]; save uint8"),
    "int8": (changed(images=images_of(torch.int8)), "`images` of type I8"),
    "rank 3": (changed(images=images_of(torch.uint8, 15, 6, 4)), r"shape \[15, 6, 4\]; save uint8 \(N, channels"),
    "int32 labels": (changed(labels=torch.arange(15, dtype=torch.int32)), "`labels` of type I32 .* save int64"),
    "rank 2 labels": (changed(labels=torch.ones(15, 1, dtype=torch.int64)), r"`labels` .* shape \[15, 1\]; save"),
    "fewer labels": (changed(labels=torch.ones(14, dtype=torch.int64)), "15 images and 14 labels; give one for each"),
    "empty": (
        changed(images=images_of(torch.uint8, 0, *SHAPE), labels=torch.ones(0, dtype=torch.int64)),
        r"`images` of type U8 and shape \[0, 3, 6, 4\]",
    ),
    "no channel": (changed(images=images_of(torch.uint8, 15, 0, 6, 4)), r"shape \[15, 0, 6, 4\]"),
    "other size": (
        changed(images=images_of(torch.uint8, 15, 3, 4, 6)),
        r"images of shape \[3, 4, 6\], and train\.safetensors of \[3, 6, 4\]; give all splits one shape",
    ),
    "shared classes": (
        changed(labels=torch.arange(15) % 4 + 11),
        r"test\.safetensors and validation\.safetensors share classes `11`, `12`; give each class to one split",
    ),
    "shared class": (
        changed(labels=torch.where(torch.arange(15) > 7, 2, 40)),
        r"test\.safetensors and train\.safetensors share class `2`;",
    ),
    "shared images": (
        changed(images=torch.cat([split_tensors(0)["images"][:2], split_tensors(2)["images"][2:]])),
        r"test\.safetensors holds 2 images that train\.safetensors holds too; give each image to one split",
    ),
    "nothing": (written(b""), r"test\.safetensors is too short for safetensors \(0 bytes\)"),
    "a pickle": (written(b"\x80\x04\x95" + bytes(64)), "is a pickle, not safetensors; save the tensors with"),
    "a checkpoint": (written(b"PK\x03\x04" + bytes(64)), "is a zip archive"),
    "a long header": (written((2**40).to_bytes(8, "little") + b"{}"), "declares a header of 1,099,511,627,776 bytes"),
    "no JSON": (written((2).to_bytes(8, "little") + b"{{"), "header that is not JSON"),
    "a hole": (
        headed({"images": entry("U8", [1, 1, 2, 2], 8, 12), "labels": entry("I64", [1], 16, 24)}, bytes(24)),
        "has a hole or an overlap at byte 0",
    ),
    "an overlap": (
        headed({"images": entry("U8", [1, 1, 2, 4], 0, 8), "labels": entry("I64", [1], 0, 8)}, bytes(8)),
        "has a hole or an overlap",
    ),
    "more than there is": (
        headed({"images": entry("U8", [2**20, 1, 512, 512], 8, 2**38 + 8), "labels": entry("I64", [1], 0, 8)}),
        "holds 0 bytes of data where its header declares",
    ),
    "a product beyond 64 bits": (
        headed({"images": entry("U8", [2**40, 2**40, 1, 1], 0, 1), "labels": entry("I64", [1], 1, 9)}, bytes(9)),
        "a shape that cannot be",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "said"), REFUSED.values(), ids=REFUSED)
def test_a_file_that_is_not_what_it_must_be_is_refused(
    spoil: Callable[[Path], object], said: str, folder: Path
) -> None:
    spoil(folder)
    assert re.search(said, str(refused(folder)))


def test_a_file_or_no_folder_is_refused(folder: Path) -> None:
    assert "train.safetensors is a file; name the folder with" in str(refused(folder / "train.safetensors",
                                                                             directories=("*",)))  # fmt: skip
    missing = refused(folder / "nothing", directories=("*",))
    assert missing.code == "not_found"


def test_a_folder_outside_and_links_out_of_it_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "allowed").mkdir()
    outside = refused(folder, directories=(str(tmp_path / "allowed"),))
    assert str(folder) not in str(outside)
    (tmp_path / "allowed/linked").symlink_to(folder)
    refused(tmp_path / "allowed/linked", directories=(str(tmp_path / "allowed"),))
    # a link of one file alone
    secret = tmp_path / "secret.safetensors"
    (folder / "test.safetensors").rename(secret)
    (folder / "test.safetensors").symlink_to(secret)
    refused(folder)
    # one that stays inside is as good as a file
    (folder / "test.safetensors").unlink()
    secret.rename(folder / "kept.safetensors")
    (folder / "test.safetensors").symlink_to("kept.safetensors")
    assert opened(folder).sha256


def test_labels_beyond_the_memory_are_refused_before_they_are_read(folder: Path) -> None:
    needed = 12 * 8 * 3 * PER_CLASS + 6 * 3 * 6 * 4
    opened(folder, most_bytes=needed)
    error = refused(folder, most_bytes=needed - 1)
    assert error.code == "budget_exceeded"
    assert "train.safetensors has labels of 120 B and images of 72 B each, of which one is held 6 times" in str(error)
    assert "give it more (`memory.host`), or smaller images" in str(error)


def test_an_image_beyond_the_memory_is_refused_and_the_rest_of_a_file_needs_none(tmp_path: Path) -> None:
    """Sparse files of a few kB on the disk; the labels of one that no memory could map are read at their place."""
    for place, split in enumerate(SPLITS):
        shape = (2, 1, 2**18, 10 * 2**14)  # 40 GiB each
        labels, size = torch.arange(2) + 10 * place, math.prod(shape)
        header = {"images": entry("U8", [*shape], 0, size), "labels": entry("I64", [2], size, size + 16)}
        headed(header)(tmp_path)
        path = (tmp_path / "test.safetensors").rename(tmp_path / f"{split}.safetensors")
        with path.open("r+b") as file:
            file.seek(size, os.SEEK_END)
            file.write(labels.numpy().tobytes())
    error = refused(tmp_path, most_bytes=240 * 2**30)
    assert error.code == "budget_exceeded"
    assert "images of 40 GiB each, of which one is held 6 times, and 240 GiB of host memory are left" in str(error)
    assert [each.labels for each in opened(tmp_path, shapes_only=True).splits.values()] == [[0, 1], [10, 11], [20, 21]]


def test_more_classes_than_can_be_listed_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_splits, "_MOST_CLASSES", 2)
    assert "train.safetensors holds 3 classes; at most 2 are taken" in str(refused(folder))


def test_many_images_take_no_more_than_is_asked_for(folder: Path) -> None:
    """Bytes of Python's and torch's objects that stay, by image: a list of numbers alone would take 40."""
    count = 60_000
    for place, split in enumerate(SPLITS):
        numbers = torch.arange(count) + place * count
        images = (numbers[:, None] >> torch.tensor([0, 8, 16])).to(torch.uint8).reshape(count, 1, 1, 3)
        save_file({"images": images, "labels": numbers // 6}, folder / f"{split}.safetensors")
    tracemalloc.start()
    try:
        data = opened(folder, most_bytes=12 * 8 * count + 6 * 3)
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [len(data.splits[split].sizes) for split in SPLITS] == [count // 6] * 3
    assert held < 30 * count
    assert most < 80 * count, most


def test_tensors_beside_images_and_labels_are_listed(folder: Path) -> None:
    save_file({**split_tensors(1), "names": torch.zeros(3)}, folder / "validation.safetensors")
    unused: list[str] = []
    opened(folder, unused=unused.append)
    assert unused == ["validation.safetensors: names"]


def test_images_are_no_memory_of_the_process(tmp_path: Path) -> None:
    """Pages of a mapped file would count as held, and a plan that is made after the digest with them."""
    rows = 3_000
    for place, split in enumerate(SPLITS):
        images = torch.randint(256, (rows, 3, 84, 84), dtype=torch.uint8)
        labels = torch.arange(rows) % 5 + 10 * place
        save_file({"images": images, "labels": labels}, tmp_path / f"{split}.safetensors")
    del images
    opened(tmp_path)  # what the libraries take once
    before = resident_bytes()
    data = opened(tmp_path)
    for place in range(5):
        data.splits["train"].read(place, range(rows // 5))
    # three files of 60 MiB; the images of a class take 12, read and joined
    assert resident_bytes() - before < 40 * 2**20


def overwrite(path: Path) -> None:
    """Turn every bit of the data, in place: size, name and inode stay."""
    content = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    content[begin:] = bytes(each ^ 0xFF for each in content[begin:])
    with path.open("r+b") as file:
        file.write(content)


@pytest.mark.parametrize("spoil", [overwrite, lambda path: path.write_bytes(b"")], ids=["overwritten", "shorter"])
def test_a_file_that_changes_while_the_job_runs_ends_it(folder: Path, spoil: Callable[[Path], object]) -> None:
    """Else results would bear the digest of images that they are not of; a shorter file is no fault of the disk."""
    data = opened(folder)
    before = data.splits["validation"].read(0, [0, 1])
    spoil(folder / "train.safetensors")
    with pytest.raises(Refusal, match=r"train\.safetensors has other images than when this job began") as caught:
        data.splits["train"].read(0, [0])
    assert (caught.value.category, caught.value.code, caught.value.pointer) == ("usage", "data_differ", "/data/path")
    assert torch.equal(data.splits["validation"].read(0, [0, 1]), before)


def test_images_that_change_between_two_readings_of_the_same_are_noticed(folder: Path) -> None:
    data = opened(folder)
    tensors = split_tensors(0)
    rows = (tensors["labels"] == 0).nonzero()[:, 0]
    tensors["images"][rows[3], -1, -1, -1] ^= 1
    save_file(tensors, folder / "new")
    with (folder / "train.safetensors").open("r+b") as file:
        file.write((folder / "new").read_bytes())
    data.splits["train"].read(0, [0, 1, 2, 4])
    with pytest.raises(Refusal, match="has other images"):
        data.splits["train"].read(0, [2, 3])
