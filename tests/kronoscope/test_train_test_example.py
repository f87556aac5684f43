"""The example for people with the public few-shot scripts: their flags, the document, plans, and bad flags."""

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import save_file

from catalog import DOCUMENT
from catalog.analyses.fewshot_training import Backbone, FewshotTrainingParams, Method, Optimiser
from catalog.requests.data_sources import ImageSplits, StrokesData
from catalog.requests.job import JobDocument
from tests.machine.template.pasted import PASTED

ROOT = Path(__file__).resolve().parents[2]
EPISODES = ("--n_query", "2", "--num_epoch", "1", "--n_episode", "2", "--test_iter", "2", "--use_amp", "0")
SMALL = ("--dataset", "Omniglot", "--backbone", "Conv4", *EPISODES)


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_test", ROOT / "examples/train_test.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = example()


def parsed(*words: str) -> JobDocument:
    document = SCRIPT.document_of(SCRIPT.parse_flags(list(words)))
    return TypeAdapter(DOCUMENT).validate_json(json.dumps(document), strict=True)


def options_of(document: JobDocument) -> FewshotTrainingParams:
    fields: Any = document
    options: FewshotTrainingParams = fields.fewshot_training
    return options


def started(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PASTED, str(ROOT / "examples/train_test.py"), *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
    )


def test_without_flags_it_is_what_the_scripts_train() -> None:
    document = parsed("--plan", "8GiB")
    assert document.kinds == ("fewshot_training",)
    assert document.data == StrokesData(source="strokes", image_size=224, channels=3)
    assert options_of(document) == FewshotTrainingParams(
        method="FSCT_cosine",
        backbone="ResNet18",
        pool="flatten",
        n_way=5,
        k_shot=5,
        n_query=16,
        n_episode=200,
        num_epoch=50,
        test_iter=600,
        gradient_accumulation_steps=2,
        use_amp=True,
        FETI=False,
        use_vic_on_attention=False,
        optimiser="AdamW",
        learning_rate=1e-3,
        weight_decay=1e-5,
        momentum=0.9,
    )


def test_every_flag_reaches_its_field() -> None:
    words = (
        "--method ProFOCT_softmax --dataset strokes --backbone ResNet34 --n_way 3 --k_shot 4 --n_query 7 "
        "--n_episode 11 --num_epoch 12 --test_iter 13 --gradient_accumulation_steps 6 --use_amp 0 --FETI 1 "
        "--use_vic_on_attention 1 --optimization SGD --learning_rate 0.5 --weight_decay 0.25 --momentum 0.125"
    )
    assert options_of(parsed(*words.split())) == FewshotTrainingParams(
        method="ProFOCT_softmax",
        backbone="ResNet34",
        pool="flatten",
        n_way=3,
        k_shot=4,
        n_query=7,
        n_episode=11,
        num_epoch=12,
        test_iter=13,
        gradient_accumulation_steps=6,
        use_amp=False,
        FETI=True,
        use_vic_on_attention=True,
        optimiser="SGD",
        learning_rate=0.5,
        weight_decay=0.25,
        momentum=0.125,
    )


def test_a_plan_of_many_classes_has_as_many_in_each_split() -> None:
    document = parsed("--dataset", "Omniglot", "--n_way", "31", "--plan", "8GiB")
    assert isinstance(document.data, StrokesData)
    assert min(document.data.train_classes, document.data.validation_classes, document.data.test_classes) >= 31


def test_an_empty_plan_is_refused_and_trains_nothing(tmp_path: Path) -> None:
    done = started("--dataset", "miniImagenet", "--plan", "", folder=tmp_path)
    assert done.returncode == 2
    assert "--plan needs a size, such as 8GiB" in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_output_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("mine")
    done = started("--dataset", "strokes", folder=tmp_path)
    assert done.returncode == 2
    assert "--output runs cannot hold strokes-ResNet18-FSCT_cosine-5way-5shot.json: " in done.stderr
    assert "Traceback" not in done.stderr


def test_the_choices_are_those_of_the_document() -> None:
    assert get_args(Method) == SCRIPT.METHODS
    assert get_args(Backbone) == SCRIPT.BACKBONES
    for flag, choices in {"--method": Method, "--backbone": Backbone, "--optimization": Optimiser}.items():
        for choice in get_args(choices):
            parsed("--dataset", "strokes", flag, choice)


@pytest.mark.parametrize(
    ("dataset", "backbone", "shape", "n_query"),
    [
        ("miniImagenet", "Conv6", (3, 84), 16),
        ("CUB", "ResNet34", (3, 224), 16),
        ("CIFAR", "Conv4", (3, 64), 16),
        ("CIFAR", "ResNet18", (3, 112), 16),
        ("Omniglot", "Conv4", (1, 28), 15),
        ("strokes", "Conv4", (1, 28), 16),
    ],
)
def test_a_plan_has_the_shapes_that_the_name_gives(
    dataset: str, backbone: str, shape: tuple[int, int], n_query: int
) -> None:
    document = parsed("--dataset", dataset, "--backbone", backbone, "--plan", "8GiB")
    assert isinstance(document.data, StrokesData)
    assert (document.data.channels, document.data.image_size) == shape
    assert options_of(document).n_query == n_query
    assert options_of(parsed("--dataset", dataset, "--n_query", "9", "--plan", "8GiB")).n_query == 9


def test_as_many_images_of_a_class_are_drawn_as_an_episode_takes() -> None:
    document = parsed("--dataset", "strokes", "--k_shot", "20", "--n_query", "45")
    assert isinstance(document.data, StrokesData)
    assert document.data.per_class == 65


def converted(folder: Path, size: int) -> None:
    folder.mkdir(parents=True)
    for place, split in enumerate(("train", "validation", "test")):
        labels = torch.arange(5 * place, 5 * place + 5).repeat_interleave(7)
        generator = torch.Generator().manual_seed(place)
        images = torch.randint(256, (35, 1, size, size), generator=generator, dtype=torch.uint8)
        save_file({"images": images, "labels": labels}, folder / f"{split}.safetensors")


def test_converted_data_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    converted(tmp_path / "CUB", 16)
    words = ["--dataset", "CUB", "--data", str(tmp_path)]
    assert parsed(*words).data == ImageSplits(source="image_splits", path=str(tmp_path / "CUB"))
    SCRIPT.note_other_size(SCRIPT.parse_flags(words))
    assert "images are 16×16; the scripts give ResNet18 224×224 of CUB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--dataset Yoga", "easyfsl's JSON and CloserLook's JSON lists can be converted: docs/few-shot.md"),
        ("--dataset CIFAR --backbone Conv4", "`python convert.py IMAGES data/CIFAR 64 3`"),
        ("--use_amp yes", "--use_amp"),
        ("--FETI 2", "invalid choice"),
        ("--method FSCT", "invalid choice"),
        ("--augment 1", "unrecognized arguments"),
    ],
)
def test_flags_that_cannot_be_are_refused(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        SCRIPT.parse_flags(words.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_plan_without_data(tmp_path: Path) -> None:
    done = started(*SMALL, "--plan", "2GiB", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the fastest exact way that fits" in done.stdout
    (document,) = (tmp_path / "runs").iterdir()
    assert f"kronoscope plan runs/{document.name} --device cuda --budget 2GiB" in done.stdout


def test_a_training_of_converted_images_leaves_document_and_results(tmp_path: Path) -> None:
    converted(tmp_path / "data/Omniglot", 28)
    done = started(*SMALL, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = tmp_path / "runs/Omniglot-Conv4-FSCT_cosine-5way-5shot"
    assert (results / "results.json").is_file()
    assert (results / "artifacts/model.safetensors").is_file()
    assert results.with_name(f"{results.name}.json").is_file()


def test_the_document_refuses_what_no_flag_can_check() -> None:
    with pytest.raises(ValidationError, match="is a form of the ResNets"):
        parsed("--dataset", "strokes", "--backbone", "Conv4", "--FETI", "1")
