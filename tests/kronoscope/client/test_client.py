"""What the client refuses by itself, without a service."""

import subprocess
from collections.abc import Callable

import pytest

from kronoscope import Client
from kronoscope.client import ClientError, ServiceUnreachable

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    "url",
    ["nonsense", "ftp://127.0.0.1", "http://", "http://[::1", "http://127.0.0.1:port", f"http://{'a' * 64}.example"],
)
def test_what_is_no_address_is_said(url: str) -> None:
    with pytest.raises(ClientError, match="is not an address of a service; write one like http://") as refused:
        Client(url)
    assert not isinstance(refused.value, ServiceUnreachable)


@pytest.mark.parametrize("value", ["é", "a b", "a\nb", "x" * 256])
def test_what_no_header_can_carry_is_said(value: str) -> None:
    with pytest.raises(ClientError, match="the API key must be"):
        Client("http://127.0.0.1:1", key=value)
    with Client("http://127.0.0.1:1") as client, pytest.raises(ClientError, match="visible ASCII characters"):
        client.submit({}, idempotency_key=value)


def test_why_a_service_is_not_ready_is_said() -> None:
    with Client("http://127.0.0.1:1") as client:
        assert "nothing answers at http://127.0.0.1:1" in (client.unready() or "")


def test_the_command_says_it_without_a_traceback(kronoscope: Run) -> None:
    done = kronoscope("submit", "job.yaml", "--url", "http://[::1")
    assert done.returncode == 2
    assert done.stderr.startswith("error: 'http://[::1' is not an address of a service")
    done = kronoscope("serve", "--embedded", "--data-dir", "job.yaml")
    assert done.returncode == 3
    assert "give a folder with --data-dir" in done.stderr
