"""The one step that reaches the hub: what it refuses, and what it says when the hub is out of reach."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from worker.execution.models import fetch


@pytest.mark.parametrize("words", [("a/b/c",), ("../../etc",), ("a/b", "--revision", "../x")])
def test_what_is_no_model_is_refused_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    asked: list[Any] = []

    def refuse(*address: Any) -> None:
        asked.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert fetch.main([*words, "--store", str(tmp_path / "store")]) == 2
    assert capsys.readouterr().err
    assert asked == []
    assert not (tmp_path / "store").exists()


def test_a_hub_out_of_reach_is_a_sentence_and_worth_another_try(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
        command = [sys.executable, "-P", "-m", "worker.execution.models.fetch", "some/model"]
        environment = {**os.environ, "HF_ENDPOINT": nobody, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
        done = subprocess.run(
            [*command, "--store", str(tmp_path / "store")],
            capture_output=True, text=True, timeout=300, check=False, env=environment,
        )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("the hub did not answer for some/model")
    assert "Traceback" not in done.stderr
