"""Export the factors of the consumers' net in every format, and hand each file to the tool that reads it.

python -P -m tests.consumers.export_all .consumers/bin/python
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.analyses.exports.activation_files import solving_factor
from kronoscope.local import measure
from tests.consumers.nets import CLASSES, DAMPING, QUERIES, examples, hessians, net

CONSUMERS = ("gptq", "corda", "laplace", "kronfluence", "mlflow", "wandb")


def export_all(folder: Path) -> None:
    """Write the files of all formats, and the damping of each singular Hessian."""
    made = measure(net(), [examples()], task="classification", kinds="factors", collection={"fisher": "empirical"})
    for named in ("gptq", "corda", "kronfluence"):
        made.factors.export(named, folder / named)  # type: ignore[arg-type]
    with zipfile.ZipFile(folder / "kronfluence") as archive:
        archive.extractall(folder / "factors_mine")
    inputs, labels = examples()
    scored = measure(
        net(), [(inputs, labels)], query=(inputs[:QUERIES], labels[:QUERIES]), task="classification", kinds="influence",
        collection={"fisher": "empirical", "ekfac": True},
        stabilisation={"damping": DAMPING, "damping_mode": "absolute"}, params={"influence": {"of": "ekfac"}},
    )  # fmt: skip
    save_file(scored.artifacts.load_tensors("influence/scores-00000.safetensors"), folder / "influence.safetensors")
    ggn = measure(net(), [examples()], task="classification", kinds="factors", collection={"fisher": "type2"})
    ggn.factors.export("laplace", folder / "laplace", outputs=CLASSES, likelihood="classification")
    found = {name: solving_factor(hessian, 1e6) for name, hessian in hessians().items()}
    dampings = {
        name: torch.tensor(each.damping, dtype=torch.float64) for name, each in found.items() if each is not None
    }
    save_file(dampings, folder / "dampings.safetensors")


def main() -> int:
    """Export, and run every consumer; returns the number that refused or disagreed."""
    python = Path(sys.argv[1]).absolute()
    here = Path(__file__).parent
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        export_all(Path(folder))
        for name in CONSUMERS:
            done = subprocess.run([python, "-P", here / f"read_{name}.py", folder, here], check=False)
            print(f"{name}: {'read' if done.returncode == 0 else 'FAILED'}", flush=True)
            failed += done.returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
