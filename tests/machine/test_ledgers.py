"""Ledgers of tests: an engine that goes from one to the next is on each only while its test has it."""

import pytest
from sqlalchemy import Engine, make_url, text

from jobs.schema.database import across_tenants
from tests.conftest import Databases, Dialect

ASKED = {"sqlite": "SELECT file FROM pragma_database_list", "postgresql": "SELECT current_database()"}


def place_of(engine: Engine) -> str:
    with across_tenants(engine).connect() as connection:
        return str(connection.execute(text(ASKED[engine.dialect.name])).scalar_one())


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
def test_an_engine_is_on_its_own_database_and_who_kept_it_stays_there(databases: Databases, dialect: Dialect) -> None:
    first, second, beside = (databases.migrated(dialect) for _ in range(3))
    names = {url: make_url(url).database for url in (first, second, beside)}
    with databases.engine(first) as engine:
        left = across_tenants(engine)
        with databases.engine(beside) as other:
            assert (place_of(engine), place_of(other)) == (names[first], names[beside])
    with databases.engine(second) as engine:
        assert (place_of(engine), place_of(left)) == (names[second], names[first])
    with databases.engine(first) as engine:
        assert place_of(engine) == names[first]
    left.dispose()
