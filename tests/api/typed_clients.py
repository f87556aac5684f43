"""Typed clients, generated from the OpenAPI document of a running service, and a whole job through the Python one.

python -m tests.api.typed_clients TOOLS

TOOLS is a folder with an environment of Python, which has openapi-python-client, and with openapi-typescript and
TypeScript beneath ``node_modules``. Both generators must have a class for every view, and nothing to warn of. The
service is real, in embedded mode, with its worker.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

# a generator knows no lines of JSON by their type; they are read as bytes
_CONFIGURATION = {"content_type_overrides": {"application/jsonl": "application/octet-stream"}}
_USE = """import type { components, paths } from "./kronoscope";

type Job = components["schemas"]["JobView"];
type Listed = paths["/v1/jobs"]["get"]["responses"]["200"]["content"]["application/json"];

export const states = (page: Listed): Job["state"][] => page.items.map((job) => job.state);
"""


def check(tools: Path) -> None:
    """Generate both clients of a service, and use them.

    Args:
        tools: The folder of the generators.

    Raises:
        CalledProcessError: If a generator warns, a type does not fit, or the job does not come through.
        SystemExit: If a generator leaves a schema out.
    """
    with tempfile.TemporaryDirectory(prefix="kronoscope-clients-") as name, _service(Path(name)) as url:
        folder = Path(name)
        document = folder / "openapi.json"
        document.write_bytes(httpx.get(f"{url}/openapi.json", timeout=60).content)
        schemas = list(json.loads(document.read_text())["components"]["schemas"])
        _generate_python(tools, folder, schemas)
        script = Path(__file__).with_name("typed_client_job.py")
        subprocess.run([tools / "bin" / "python", script, url], cwd=folder / "python", check=True)
        _generate_typescript(tools, folder, schemas)
    sys.stdout.write(f"both clients have all {len(schemas)} schemas; a whole job went through the Python one\n")


@contextmanager
def _service(folder: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*("serve", "--embedded", "--port", str(port), "--data-dir", str(folder / "data"))]
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "kronoscope.cli.main", *command],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stderr=subprocess.PIPE,
        text=True,
    ) as serving:
        try:
            assert serving.stderr is not None
            said = []
            for line in serving.stderr:
                said.append(line)
                if line.startswith("ready:"):
                    break
            else:
                raise SystemExit("".join(said))
            yield f"http://127.0.0.1:{port}"
        finally:
            serving.send_signal(signal.SIGINT)
            serving.communicate(timeout=300)


def _generate_python(tools: Path, folder: Path, schemas: list[str]) -> None:
    configuration = folder / "configuration.json"
    configuration.write_text(json.dumps(_CONFIGURATION))
    command = [tools / "bin" / "openapi-python-client", "generate", "--fail-on-warning", "--meta", "none"]
    places = ["--path", folder / "openapi.json", "--output-path", folder / "python" / "kronoscope_client"]
    (folder / "python").mkdir()
    # it formats by the ruff beside it
    paths = {"PATH": f"{(tools / 'bin').absolute()}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([*command, *places, "--config", configuration], env={**os.environ, **paths}, check=True)
    listed = (folder / "python" / "kronoscope_client" / "models" / "__init__.py").read_text()
    classes = set(re.findall(r'^    "(\w+)",$', listed, re.MULTILINE))
    _require_all("openapi-python-client", schemas, classes)


def _generate_typescript(tools: Path, folder: Path, schemas: list[str]) -> None:
    binaries = tools / "node_modules" / ".bin"
    made = folder / "kronoscope.ts"
    done = subprocess.run(
        [binaries / "openapi-typescript", folder / "openapi.json", "-o", made],
        capture_output=True,
        text=True,
        check=True,
    )
    if re.search("warn", done.stdout + done.stderr, re.IGNORECASE):
        raise SystemExit(done.stdout + done.stderr)
    _require_all("openapi-typescript", schemas, set(re.findall(r"^        (\w+): ", made.read_text(), re.MULTILINE)))
    (folder / "use.ts").write_text(_USE)
    node = shutil.which("node") or "node"
    subprocess.run([node, binaries / "tsc", "--noEmit", "--strict", folder / "use.ts", made], check=True)


def _require_all(generator: str, schemas: list[str], made: set[str]) -> None:
    if missing := [name for name in schemas if name not in made]:
        raise SystemExit(f"{generator} left out {', '.join(missing)}")


if __name__ == "__main__":
    check(Path(sys.argv[1]).absolute())
