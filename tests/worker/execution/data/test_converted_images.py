"""The converter of `docs/few-shot.md`: from every form of a data set to the files that the loader reads."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
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


def test_images_are_those_that_a_viewer_shows_and_what_is_skipped_is_printed(
    convert: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    drawn(tmp_path / "given")
    bee = tmp_path / "given/train/bee"
    for file in bee.iterdir():
        file.unlink()
    half = np.zeros((SIDE, SIDE), np.uint8)
    half[: SIDE // 2] = 255
    upside_down = Image.Exif()
    upside_down[0x112] = 3
    Image.fromarray(half).save(bee / "0.png", exif=upside_down)
    Image.fromarray(np.full((SIDE, SIDE), 20_000, np.uint16)).save(bee / "1.png")
    Image.new("RGBA", (SIDE, SIDE), (0, 0, 0, 51)).save(bee / "2.webp", lossless=True)
    Image.new("P", (SIDE, SIDE)).save(bee / "3.gif", transparency=0)
    Image.new("RGB", (SIDE, SIDE), (9, 9, 9)).save(bee / "4.BMP")
    (bee / "._0.png").write_bytes(b"a file of macOS")
    (tmp_path / "given/train/fox/nested").mkdir(parents=True)
    Image.new("RGB", (SIDE, SIDE)).save(tmp_path / "given/train/fox/nested/0.png")
    Image.new("RGB", (SIDE, SIDE)).save(tmp_path / "given/train/stray.png")
    done = convert("given", "made", SIZE)
    assert done.returncode == 0, done.stderr
    images = opened(tmp_path / "made")["train"].read(1, range(5))
    turned = torch.from_numpy(half[::-1].copy())[1 : 1 + SIZE, 1 : 1 + SIZE]
    assert torch.equal(images[0], turned.expand(3, -1, -1))
    # 20,000 / 65,535 of 255, a fifth of black over white, white, and what it is
    assert [image.unique().tolist() for image in images[1:]] == [[78], [204], [255], [9]]
    for skipped in ("._0.png", "fox/nested/0.png", "train/stray.png", "notes.txt"):
        assert skipped in done.stdout
    assert "given/train/fox: left out" in done.stdout
    assert "train: 8 images of 2 classes" in done.stdout


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:200])


def without_scale(file: Path) -> None:
    Image.new("F", (SIDE, SIDE), 0.5).save(file, "TIFF")


def animated(file: Path) -> None:
    Image.new("L", (SIDE, SIDE)).save(file, "GIF", save_all=True, append_images=[Image.new("L", (SIDE, SIDE), 9)])


@pytest.mark.parametrize(
    ("harm", "words", "sentence"),
    [
        (cut, (SIZE,), "test/elk/2.png cannot be read as an image (image file is truncated)"),
        (without_scale, (SIZE,), "test/elk/2.png has pixels of mode F, without a scale; save it with 8 or 16 bits"),
        (animated, (SIZE,), "test/elk/2.png has 2 frames; give each as a file"),
        (None, (SIZE, 4), "SIZE 1 or more, CHANNELS 1 or 3 (got given made 20 4)"),
        (None, (0,), "SIZE 1 or more, CHANNELS 1 or 3 (got given made 0)"),
    ],
)
def test_what_cannot_be_converted_is_named_and_leaves_earlier_files(
    harm: Callable[[Path], None] | None,
    words: tuple[int, ...],
    sentence: str,
    convert: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    drawn(tmp_path / "given")
    (tmp_path / "made").mkdir()
    (tmp_path / "made/train.safetensors").write_bytes(b"earlier")
    if harm is not None:
        harm(tmp_path / "given/test/elk/2.png")
    done = convert("given", "made", *words)
    assert done.returncode != 0
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert [file.name for file in (tmp_path / "made").iterdir()] == ["train.safetensors"]
    assert (tmp_path / "made/train.safetensors").read_bytes() == b"earlier"
