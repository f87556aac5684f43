"""What a hostile job is run with: real processes, real services, and the real ledger on both databases."""

from tests.api.conftest import keyed
from tests.worker.conftest import job, scripted, settings, submitted

__all__ = ["job", "keyed", "scripted", "settings", "submitted"]
