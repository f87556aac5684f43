"""Write ops/locks: every package that an image installs, with the SHA-256 of its files.

torch is left out, and the packages that only its builds for CUDA bring: a machine without a GPU takes another
build of the same version, which has another hash. constraints.txt pins torch, and torch pins those packages.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = {
    "build": ("-", []),
    "api": ("pyproject.toml", ["--extra=api"]),
    "worker": ("pyproject.toml", ["--extra=worker"]),
}
"""What builds both images (by its name, over standard input), and the extras that each of them installs."""


def main(uv: str) -> None:
    """Write the lock of each image.

    Args:
        uv: The program that resolves.
    """
    pinned = _names((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    for name, source in LOCKS.items():
        left_out = ["torch", *sorted(_names(_compile(uv, *source)) - pinned)]
        locked = _compile(uv, *source, "--generate-hashes", *(f"--no-emit-package={each}" for each in left_out))
        path = ROOT / "ops/locks" / f"{name}.txt"
        path.write_text(f"# written by `make lock`\n{locked}", encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {len(_names(locked))} packages")  # noqa: T201 - a command speaks


def _compile(uv: str, requirements: str, extras: list[str], *options: str) -> str:
    command = [uv, "pip", "compile", "--quiet", requirements, *extras, "--constraint=constraints.txt", *options]
    command += ["--python-version=3.11.0", "--python-platform=linux", "--no-annotate", "--no-header"]
    return subprocess.run(  # noqa: S603
        command, cwd=ROOT, check=True, input="hatchling", stdout=subprocess.PIPE, text=True
    ).stdout


def _names(requirements: str) -> set[str]:
    """The packages of a file of requirements, as package indexes write their names."""
    return {
        re.sub(r"[-_.]+", "-", name).lower()
        for name in re.findall(r"^([\w.-]+)(?:\[.*\])?==", requirements, re.MULTILINE)
    }


if __name__ == "__main__":
    main(sys.argv[1])
