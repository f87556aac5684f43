"""The images are built, and the stack brought up, once for all tests of this folder."""

from collections.abc import Iterator

import httpx
import pytest

from tests.docker.stack import Stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("compose"))
    stack.compose("build", timeout=1500)
    try:
        stack.up()
        yield stack
    finally:
        stack.compose("down", "--volumes", "--timeout", "20", timeout=300)


@pytest.fixture(scope="session")
def key(stack: Stack) -> str:
    return stack.key("docker-test")


@pytest.fixture
def client(stack: Stack, key: str) -> Iterator[httpx.Client]:
    with stack.client(key) as client:
        yield client
