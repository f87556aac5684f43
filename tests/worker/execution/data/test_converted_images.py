"""The converter of `docs/few-shot.md`: from every form of a data set to the files that the loader reads."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from catalog.requests.data_sources import ImageSplits
from engine.image_data import ImageClasses
from tests.test_code_blocks import ROOT, blocks
from worker.execution.data.images.image_splits import load
from worker.execution.loader_context import LoaderContext
from worker.execution.refusal import Refusal

SIZE, SIDE = 20, 23
PER_CLASS = 3
# in the order of their labels by name
CLASSES = {"train": ("ant", "bee"), "val": ("cow",), "test": ("dog", "elk")}


@pytest.fixture
def convert(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    (text,) = [block.text for block in blocks(ROOT / "docs/few-shot.md") if block.mark == "file=convert.py"]
    (tmp_path / "convert.py").write_text(text)

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "convert.py", *map(str, words)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)

    return run


def picture(seed: int) -> Tensor:
    """An image of the size that is cut out of, so that resizing changes nothing, uint8 (3, 23, 23)."""
    return torch.randint(256, (3, SIDE, SIDE), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def drawn(folder: Path) -> dict[str, list[Tensor]]:
    """Draw the folders of all classes, and return the images of each."""
    images: dict[str, list[Tensor]] = {}
    for split, names in CLASSES.items():
        for name in names:
            (folder / split / name).mkdir(parents=True)
            images[name] = [picture(ord(name[0]) * PER_CLASS + place) for place in range(PER_CLASS)]
            for place, image in enumerate(images[name]):
                rows = image.permute(1, 2, 0).numpy()
                Image.fromarray(rows).save(folder / split / name / f"{place}.png")
            (folder / split / name / "notes.txt").write_text("no image")
    return images


def as_folders(folder: Path) -> None:
    """The folders as they are."""


def as_easyfsl(folder: Path) -> None:
    for split, names in CLASSES.items():
        (folder / split).rename(folder / f"{split} images")
        roots = [f"{folder.name}/{split} images/{name}" for name in names]
        (folder / f"{split}.json").write_text(json.dumps({"class_names": names, "class_roots": roots}))


def as_closer_look(folder: Path) -> None:
    everything = [name for names in CLASSES.values() for name in names]
    for split, names in CLASSES.items():
        (folder / split).rename(folder / f"{split} images")
        files = [
            (str(file), everything.index(name))
            for name in names
            for file in sorted((folder / f"{split} images" / name).glob("*.png"))
        ]
        lists = {
            "label_names": everything,
            "image_names": [file for file, _ in files],
            "image_labels": [label for _, label in files],
        }
        written = {"train": "base", "val": "val", "test": "novel"}[split]
        (folder / f"{written}.json").write_text(json.dumps(lists))


def opened(folder: Path) -> dict[str, ImageClasses]:
    context = LoaderContext(store=folder, directories=(str(folder),))
    return dict(load(ImageSplits(source="image_splits", path=str(folder)), context).splits)


@pytest.mark.parametrize("form", [as_folders, as_easyfsl, as_closer_look])
def test_every_form_becomes_the_same_files(
    form: Callable[[Path], None], convert: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    images = drawn(tmp_path / "given")
    form(tmp_path / "given")
    done = convert("given", "made", SIZE)
    assert done.returncode == 0, done.stderr
    splits = opened(tmp_path / "made")
    label = 0
    for split, names in zip(("train", "validation", "test"), CLASSES.values(), strict=True):
        assert list(splits[split].names) == [str(label + place) for place in range(len(names))]
        assert list(splits[split].sizes) == [PER_CLASS] * len(names)
        for place, name in enumerate(names):
            # the centre: a row and a column are cut at the beginning, two at the end
            expected = torch.stack(images[name])[:, :, 1 : 1 + SIZE, 1 : 1 + SIZE]
            assert torch.equal(splits[split].read(place, range(PER_CLASS)), expected)
        label += len(names)


def test_one_channel_and_jpegs(convert: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    for split, (name, *_) in CLASSES.items():
        (tmp_path / "given" / split / name).mkdir(parents=True)
        for place, grey in enumerate((40, 200)):
            colour = (grey + ord(name[0]) % 8,) * 3
            Image.new("RGB", (31, 17), colour).save(tmp_path / "given" / split / name / f"{place}.jpg")
    done = convert("given", "made", 28, 1)
    assert done.returncode == 0, done.stderr
    for images in opened(tmp_path / "made").values():
        assert images.shape == (1, 28, 28)
        dark, bright = images.read(0, range(2)).double().mean((1, 2, 3))
        assert 40 <= dark <= 50
        assert 200 <= bright <= 210


def test_a_class_in_two_splits_keeps_one_label_and_is_refused(
    convert: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    drawn(tmp_path / "given")
    (tmp_path / "given/val/cow").rename(tmp_path / "given/val/bee")
    assert convert("given", "made", SIZE).returncode == 0
    with pytest.raises(Refusal, match="share class"):
        opened(tmp_path / "made")


def test_a_split_that_is_not_there_is_named(
    convert: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "given/train").mkdir(parents=True)
    done = convert("given", "made", SIZE)
    assert done.returncode != 0
    assert "given must hold one of validation, val" in done.stderr
    assert not (tmp_path / "made").exists()
