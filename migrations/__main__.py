"""``python -P -m migrations``: bring the database that the environment names to this version's schema.

With the passwords of the roles in the environment it makes them too (`migrations.roles`); the URL is then that of a
role that may, and only this command needs it.
"""

import os
import sys

from sqlalchemy import make_url

from jobs.errors import LedgerError, LedgerUnavailable, SettingsInvalid
from jobs.schema.database import open_database, upgrade_schema, writing
from jobs.settings import LedgerSettings, RoleSettings
from migrations.roles import LOGINS, MIGRATE, OWNER, act_as_owner, grant_rights, prepare_roles


def migrate(url: str, passwords: RoleSettings) -> None:
    """Migrate a database, and make its roles where they have passwords."""
    if passwords.migrate_password is None:
        upgrade_schema(url)
        return
    administrator = open_database(url)
    migrator_url = make_url(url).set(username=MIGRATE, password=passwords.migrate_password)
    migrator = open_database(migrator_url.render_as_string(hide_password=False))
    try:
        if administrator.dialect.name != "postgresql":
            raise SettingsInvalid("SQLite has no roles; leave KRONOSCOPE_MIGRATE_PASSWORD and its like out")
        by_role = {role: getattr(passwords, f"{role.removeprefix('kronoscope_')}_password") or "" for role in LOGINS}
        with writing(administrator) as connection:
            prepare_roles(connection, by_role)
        upgrade_schema(migrator_url.render_as_string(hide_password=False), role=OWNER)
        with writing(migrator) as connection:
            act_as_owner(connection)
            grant_rights(connection, passwords.api_password or "")
    finally:
        administrator.dispose()
        migrator.dispose()


def main() -> int:
    """Migrate; returns the exit code (0 done, 3 the database does not answer, 4 the operator must act)."""
    try:
        migrate(LedgerSettings.from_environment(os.environ).database_url, RoleSettings.from_environment(os.environ))
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
