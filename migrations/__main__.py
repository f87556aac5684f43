"""``python -P -m migrations``: bring the database that the environment names to this version's schema."""

import os
import sys

from jobs.errors import LedgerError, LedgerUnavailable
from jobs.schema.database import upgrade_schema
from jobs.settings import LedgerSettings


def main() -> int:
    """Migrate; returns the exit code (0 done, 3 the database does not answer, 4 the operator must act)."""
    try:
        upgrade_schema(LedgerSettings.from_environment(os.environ).database_url)
    except LedgerUnavailable as error:
        sys.stderr.write(f"{error}\n{error.__cause__}\n")
        return 3
    except LedgerError as error:
        sys.stderr.write(f"{error}\n")
        return 4
    sys.stdout.write("the schema is up to date\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
