"""Divided jobs in this process."""

from tests.worker.execution.pieces.conftest import runner

__all__ = ["runner"]
