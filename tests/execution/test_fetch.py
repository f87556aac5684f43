"""The one step that reaches the hub: what it refuses, and what it says when the hub is out of reach."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest


def fetch(store: Path, *words: str) -> subprocess.CompletedProcess[str]:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
        command = [sys.executable, "-P", "-m", "worker.model_loading.fetch", *words, "--store", str(store)]
        environment = {**os.environ, "HF_ENDPOINT": nobody, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


@pytest.mark.parametrize("words", [("a/b/c",), ("../../etc",), ("a/b", "--revision", "../x")])
def test_what_is_no_model_is_refused_unasked(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = fetch(tmp_path / "store", *words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "store").exists()


def test_a_hub_out_of_reach_is_a_sentence_and_worth_another_try(tmp_path: Path) -> None:
    done = fetch(tmp_path / "store", "some/model")
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("the hub did not answer for some/model")
    assert "Traceback" not in done.stderr
