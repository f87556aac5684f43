"""Train and test a few-shot model by the flags of the public few-shot scripts.

    python examples/train_test.py --dataset strokes --backbone Conv4 --num_epoch 5 --test_iter 80
    python examples/train_test.py --method ProFOCT_cosine --backbone ResNet34 --use_amp 1 --plan 16GiB

The flags become a job document, which `kronoscope run` runs, or which `kronoscope plan` plans for a GPU with so much
memory; a plan needs no data. docs/few-shot.md says which flag is which field, and how data sets are converted.
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

HEADS = "CTX_softmax", "CTX_cosine", "FSCT_softmax", "FSCT_cosine", "ProFOCT_softmax", "ProFOCT_cosine"
METHODS = "ProtoNet", *HEADS
BACKBONES = "Conv4", "Conv6", "ResNet18", "ResNet34"
# channels, and the side of an image for Conv nets and for ResNets, as the scripts have them
SHAPES = {
    "miniImagenet": (3, 84, 224),
    "CUB": (3, 84, 224),
    "CIFAR": (3, 64, 112),
    "Omniglot": (1, 28, 28),
    "strokes": (1, 28, 28),
}
SPLITS = "train", "validation", "test"
# flags that are fields of the document under the same name
VALUES = (
    *("method", "backbone", "n_way", "k_shot", "n_query", "n_episode", "num_epoch", "test_iter"),
    *("gradient_accumulation_steps", "learning_rate", "weight_decay", "momentum"),
)
SWITCHES = "FETI", "use_amp", "use_vic_on_attention"
# drawn of each class; an episode takes no more
LEAST_PER_CLASS = 40
# of the smallest split of drawn images
FEWEST_CLASSES = 30


def parse_flags(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line, with the defaults of the scripts."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--FLAG VALUE …]   (--help lists them)",
        description="Train and test a few-shot model within a memory budget.",
    )
    parser.add_argument("--method", choices=METHODS, default="FSCT_cosine")
    parser.add_argument("--dataset", default="miniImagenet", metavar=f"{{{','.join(SHAPES)}}}")
    parser.add_argument("--backbone", choices=BACKBONES, default="ResNet18")
    parser.add_argument("--n_way", type=int, default=5, help="classes of an episode (5)")
    parser.add_argument("--k_shot", type=int, default=5, help="support images of each class (5)")
    parser.add_argument("--n_query", type=int, help="query images of each class (16; of Omniglot 15)")
    parser.add_argument("--n_episode", type=int, default=200, help="training episodes of an epoch (200)")
    parser.add_argument("--num_epoch", type=int, default=50, help="epochs (50)")
    parser.add_argument("--test_iter", type=int, default=600, help="episodes of a test (600)")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2, help="slices of one episode (2)")
    parser.add_argument("--use_amp", type=int, choices=(0, 1), default=1, help="16 bits where the device has them (1)")
    parser.add_argument("--FETI", type=int, choices=(0, 1), default=0, help="the other stem of a ResNet (0)")
    parser.add_argument("--use_vic_on_attention", type=int, choices=(0, 1), default=0, help="of ProFOCT (0)")
    parser.add_argument("--optimization", choices=("AdamW", "Adam", "SGD"), default="AdamW")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--weight_decay", type=float, default=1e-5)
    parser.add_argument("--momentum", type=float, default=0.9, help="of SGD (0.9)")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the converted data sets (data)")
    parser.add_argument("--output", type=Path, default=Path("runs"), help="folder of documents and results (runs)")
    parser.add_argument("--plan", metavar="BUDGET", help="plan for a GPU with so much memory, such as 8GiB")
    parser.add_argument("--force", action="store_true", help="replace the results of an earlier run")
    flags = parser.parse_args(arguments)
    if flags.dataset not in SHAPES:
        parser.error(
            f"--dataset must be one of {', '.join(SHAPES)} (got {flags.dataset!r}); folders split/class/image.png, "
            "easyfsl's JSON and CloserLook's JSON lists can be converted: docs/few-shot.md has the script, and a job "
            "document of your own takes any converted folder (`data: {source: image_splits, path: …}`)"
        )
    if flags.plan == "":
        parser.error("--plan needs a size, such as 8GiB")
    if flags.n_query is None:
        flags.n_query = 15 if flags.dataset == "Omniglot" else 16
    if flags.plan is None and flags.dataset != "strokes":
        missing = [name for name in files_of(flags) if not name.is_file()]
        if missing:
            size, channels = image_size(flags), SHAPES[flags.dataset][0]
            parser.exit(
                2,
                f"{', '.join(map(str, missing))} must exist; make them with the converter of docs/few-shot.md "
                f"(`python convert.py IMAGES {flags.data / flags.dataset} {size} {channels}`), name another folder "
                "with --data, or take --dataset strokes, which needs no files\n",
            )
    return flags


def image_size(flags: argparse.Namespace) -> int:
    """Return the side of an image, as the scripts have it for this data set and backbone."""
    _, conv, resnet = SHAPES[flags.dataset]
    return resnet if flags.backbone.startswith("ResNet") else conv


def files_of(flags: argparse.Namespace) -> list[Path]:
    """List the files of the converted data set."""
    return [flags.data / flags.dataset / f"{split}.safetensors" for split in SPLITS]


def data_of(flags: argparse.Namespace) -> dict[str, Any]:
    """Return the document's data: the converted folder, or drawn images of the same shape."""
    if flags.plan is None and flags.dataset != "strokes":
        return {"source": "image_splits", "path": str(flags.data / flags.dataset)}
    drawn = max(LEAST_PER_CLASS, flags.k_shot + flags.n_query)
    channels, size = SHAPES[flags.dataset][0], image_size(flags)
    data = {"source": "strokes", "image_size": size, "channels": channels, "per_class": drawn}
    # each split has as many classes as an episode takes
    return data if flags.n_way <= FEWEST_CLASSES else data | {f"{split}_classes": 4 * flags.n_way for split in SPLITS}


def document_of(flags: argparse.Namespace) -> dict[str, Any]:
    """Return the job document."""
    options = {name: getattr(flags, name) for name in VALUES}
    options |= {name: bool(getattr(flags, name)) for name in SWITCHES}
    options |= {"optimiser": flags.optimization, "pool": "flatten"}
    return {"kind": "fewshot_training", "data": data_of(flags), "fewshot_training": options}


def note_other_size(flags: argparse.Namespace) -> None:
    """Say where converted images have another size than the scripts give the backbone."""
    try:
        with safe_open(files_of(flags)[0], framework="np") as images:
            *_, rows, columns = images.get_slice("images").get_shape()
    except (SafetensorError, ValueError, OSError):
        return  # the job says what is wrong with the file
    size = image_size(flags)
    if (rows, columns) != (size, size):
        print(f"note: images are {rows}×{columns}; the scripts give {flags.backbone} {size}×{size} of {flags.dataset}")


def main() -> int:
    """Write the document, and run or plan it; returns the exit code of `kronoscope`."""
    flags = parse_flags()
    episode = f"{flags.n_way}way-{flags.k_shot}shot"
    folder = flags.output / f"{flags.dataset}-{flags.backbone}-{flags.method}-{episode}"
    document = Path(f"{folder}.plan.json" if flags.plan else f"{folder}.json")
    try:
        document.parent.mkdir(parents=True, exist_ok=True)
        document.write_text(json.dumps(document_of(flags), indent=2) + "\n")
    except OSError as error:
        print(f"--output {flags.output} cannot hold {document.name}: {error.strerror}", file=sys.stderr)
        return 2
    command = ["run", str(document), "--output", str(folder), *["--force"] * flags.force]
    if flags.plan:
        command = ["plan", str(document), "--device", "cuda", "--budget", flags.plan]
    elif flags.dataset != "strokes":
        note_other_size(flags)
    print("kronoscope", shlex.join(command), flush=True)
    return subprocess.run([Path(sys.executable).with_name("kronoscope"), *command], check=False).returncode  # noqa: S603


if __name__ == "__main__":
    sys.exit(main())
