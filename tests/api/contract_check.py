"""The served OpenAPI document against the service itself: schemathesis asks with a key, with valid and invalid data.

python -m tests.api.contract_check SCHEMATHESIS [option…]

SCHEMATHESIS is its command, in an environment of its own; options are handed on. Nothing may be answered 5xx, and no
status, header, type or body that the document does not declare. The service is real, on SQLite and a free port, without
workers; its jobs are written as workers write them. It is asked twice: for everything that is read of a job that has
ended, by its id and its files' names; then for whatever schemathesis makes up, and what it learns from answers.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from jobs.records import LOCAL_TENANT
from jobs.schema.database import open_database, upgrade_schema
from jobs.tenancy.api_keys import create_key
from tests.api.seeding import failed, finished, partly_measured, running
from tests.api.server import KEY_SECRET, serve

_EXCLUDED = (
    # a document that is valid by its schema may still name a model that nobody has, which is 422
    "positive_data_acceptance",
)
_SETTINGS = {
    "KRONOSCOPE_KEY_SECRET": KEY_SECRET,
    # what waits for workers, of whom there are none, is answered at once
    "KRONOSCOPE_ESTIMATE_SECONDS": "0",
    "KRONOSCOPE_STREAM_SECONDS": "0.1",
    "KRONOSCOPE_STREAMS_PER_KEY": "100",
    "KRONOSCOPE_WEBHOOK_KEY": "k" * 32,
}

_READ = """
[parameters]
"path.job_id" = "{job_id}"

[[operations]]
include-operation-id = "download_artifact"
parameters = {{ "path.job_id" = "{job_id}", "path.name" = "memory_curve.json" }}

[[operations]]
include-operation-id = "read_layer"
parameters = {{ "path.job_id" = "{job_id}", "path.name" = "features.0" }}
"""


def check(command: str, options: list[str]) -> int:
    """Start the service, and let schemathesis ask it.

    Args:
        command: The command of schemathesis.
        options: More of its options.

    Returns:
        Its exit code: 0 where everything is as declared.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        url = f"sqlite:///{folder / 'ledger.db'}"
        upgrade_schema(url)
        engine = open_database(url)
        key = create_key(engine, KEY_SECRET, "local")
        job_id = finished(engine, folder / "artifacts", LOCAL_TENANT, with_factors=True)
        partly_measured(engine, folder / "artifacts", LOCAL_TENANT)
        failed(engine, LOCAL_TENANT)
        running(engine, LOCAL_TENANT)
        engine.dispose()
        with serve(url, folder, {**_SETTINGS, "KRONOSCOPE_METRICS_TOKEN": key}) as server:
            read = folder / "read.toml"
            read.write_text(_READ.format(job_id=job_id))
            asked = [
                *("run", f"{server.url}/openapi.json", "--header", f"Authorization: Bearer {key}"),
                *("--checks", "all", "--exclude-checks", ",".join(_EXCLUDED), "--mode", "all"),
                *(
                    "--continue-on-failure",
                    "--request-timeout",
                    "40",
                    "--suppress-health-check",
                    "filter_too_much,too_slow",
                    *options,
                ),
            ]
            known = ["--config-file", str(read)]
            only_read = ["--include-method", "GET", "--include-path-regex", "/jobs/"]
            return max(
                subprocess.run([command, *known, *asked, *only_read], check=False, cwd=folder).returncode,
                subprocess.run([command, *asked], check=False, cwd=folder).returncode,
            )


if __name__ == "__main__":
    sys.exit(check(sys.argv[1], sys.argv[2:]))
