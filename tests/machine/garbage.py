"""Garbage of a run: the collector passes over what was imported for the tests, as it does in a job's child.

A collection looks at every object of the process, of which the imports leave a million, and the engine asks for one
wherever memory has run out.
"""

import gc

import pytest


class ImportsAreKept:
    """Collects nothing while test files are imported, and leaves what they have imported out of each collection."""

    def __init__(self) -> None:
        gc.disable()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        """Keep what is there before the first test, and begin to collect."""
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)  # at 700 a thirtieth of all processor seconds went into it
        gc.enable()


def register(config: pytest.Config) -> None:
    """Do so in each process that runs tests."""
    config.pluginmanager.register(ImportsAreKept(), "imports are kept")
