"""Settings say what is missing, and secrets stay out of sight."""

import re
from pathlib import Path

import pytest

from jobs.environment import secret
from jobs.errors import SettingsInvalid
from jobs.schema.database import open_database
from jobs.settings import LedgerSettings, ServiceSettings

URL = "postgresql://user:canary@host/name"


def test_the_environment_is_read_once_with_its_defaults() -> None:
    read = LedgerSettings.from_environment({"KRONOSCOPE_DATABASE_URL": URL, "DATABASE_URL": "sqlite:///other"})
    assert read.database_url == URL
    assert (read.heartbeat_seconds, read.lease_seconds, read.reaper_seconds) == (10, 45, 10)
    assert (read.retention_days, read.retention_files) == (None, "keep")
    assert read.artifact_root == Path(".kronoscope/artifacts").absolute()


def test_secrets_come_from_files_and_do_not_show(tmp_path: Path) -> None:
    (tmp_path / "url").write_text(f"{URL}\n")
    read = LedgerSettings.from_environment({"DATABASE_URL_FILE": str(tmp_path / "url")})
    assert read.database_url == URL
    assert "canary" not in repr(read)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"DATABASE_URL": URL, "KRONOSCOPE_LEASE_SECONDS": "soon"},
        {"DATABASE_URL": URL, "KRONOSCOPE_LEASE_SECONDS": "nan"},
        {"DATABASE_URL": URL, "KRONOSCOPE_REAPER_SECONDS": "0"},
        {"DATABASE_URL": URL, "KRONOSCOPE_LEASE_SECONDS": "12"},
        {"DATABASE_URL": URL, "KRONOSCOPE_RETENTION_DAYS": "a year"},
        {"DATABASE_URL": URL, "KRONOSCOPE_RETENTION_DAYS": "-1"},
        {"DATABASE_URL": URL, "KRONOSCOPE_RETENTION_DAYS": "nan"},
        {"DATABASE_URL": URL, "KRONOSCOPE_RETENTION_FILES": "burn"},
        {"DATABASE_URL": URL, "DATABASE_URL_FILE": "/x"},
        {"DATABASE_URL_FILE": "/nowhere"},
    ],
)
def test_settings_that_make_no_sense_are_refused(environ: dict[str, str]) -> None:
    with pytest.raises(SettingsInvalid) as refused:
        LedgerSettings.from_environment(environ)
    assert "canary" not in str(refused.value)


@pytest.mark.parametrize("entry", ["lab.models", "lab.models:*", "local=lab.models", "lab:a b"])
def test_a_factory_that_no_job_could_name_is_refused_at_start(entry: str) -> None:
    environ = {"DATABASE_URL": URL, "KRONOSCOPE_ALLOW_FACTORIES": f"lab.data:digits,{entry}"}
    with pytest.raises(SettingsInvalid, match=re.escape(f"has {entry.removeprefix('local=')!r}; list each as")):
        ServiceSettings.from_environment(environ)


def test_factories_are_for_all_or_for_one_tenant() -> None:
    given = "lab.data:digits,local=lab.models:net"
    read = ServiceSettings.from_environment({"DATABASE_URL": URL, "KRONOSCOPE_ALLOW_FACTORIES": given})
    assert read.factories_of("local") == ("lab.data:digits", "lab.models:net")
    assert read.factories_of("another") == ("lab.data:digits",)


def test_an_empty_secret_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(SettingsInvalid, match="0 bytes"):
        secret({"KEY_FILE": str(tmp_path / "empty")}, "KEY")


@pytest.mark.parametrize("url", ["", "no url", "mysql://host/name", "sqlite://", "sqlite:///:memory:"])
def test_databases_that_are_none_of_ours_are_refused(url: str) -> None:
    with pytest.raises(SettingsInvalid):
        open_database(url)
