"""`make demo`: start the service, run one job on a small trained CNN through it, show what came back.

Everything stays in ``.kronoscope/demo``. With ``--once`` the service ends after the table; without it
the page stays until ctrl-C. ``--picture FILE`` (`make picture`) takes the page's picture for the README and ends.
"""

import argparse
import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from kronoscope import Client
from kronoscope.client import ClientError
from kronoscope.display.progress import display_for
from kronoscope.display.tables import layer_table, summary_line

DATA = Path(".kronoscope/demo")
USUAL_PORT = 8000
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
START_SECONDS = 60
END_SECONDS = 30
DOCUMENT = {
    "kind": ["factors", "capacity"],
    "model": {"source": "builtin", "name": "digits_cnn"},
    "data": {"source": "builtin", "name": "digits"},
    "task": {"type": "classification"},
    "labels": {"example": "demo"},
}

console = Console(highlight=False)
if not console.is_terminal:
    console = Console(highlight=False, width=100)


class DemoError(Exception):
    """The demo cannot go on; the message says why, and what to look at."""


def say(sentence: str) -> None:
    """One line about what is happening."""
    console.print(f"[bold cyan]==>[/] {sentence}", soft_wrap=True)


def free_port() -> int:
    """The usual port, or any other where that is taken."""
    for port in (USUAL_PORT, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise DemoError("no port of 127.0.0.1 is free")


@contextlib.contextmanager
def service() -> Iterator[Client]:
    """The service in embedded mode, ready; it is ended when the block is left."""
    say("The service in embedded mode: API and worker as two processes over SQLite")
    port, log = free_port(), DATA / "service.log"
    command = Path(sys.executable).with_name("kronoscope")
    with log.open("wb") as sink:
        running = subprocess.Popen(  # noqa: S603 - our own command
            [command, "serve", "--embedded", "--port", str(port), "--data-dir", DATA],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # ctrl-C is for the demo, which then ends the service in order
        )
    try:
        with Client(f"http://127.0.0.1:{port}") as client:
            deadline = time.monotonic() + START_SECONDS
            while not client.ready():
                if running.poll() is not None or time.monotonic() > deadline:
                    raise DemoError(f"the service did not start:\n{log.read_text(errors='replace')[-3000:]}")
                time.sleep(0.1)
            yield client
    finally:
        running.terminate()
        try:
            running.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def run_job(client: Client) -> str:
    """Submit over REST, follow to the end, show the table; returns the job's id."""
    say(f"A capacity job over REST: POST {client.url}/v1/jobs")
    job = submitted = client.submit(DOCUMENT)
    with display_for(console) as display:
        for job in client.follow(submitted.id):
            progress = job.progress
            if progress is None or progress.stage is None:
                display.update(job.state, 0, None, "")
            else:
                display.update(progress.stage, progress.done or 0, progress.total, progress.unit or "")
    if job.state != "succeeded":
        raise DemoError(f"the job {job.state}: {job.failure.message if job.failure else 'no reason was given'}")
    console.print()
    console.print(layer_table("capacity", list(client.layers(job.id, kind="capacity"))))
    console.print(summary_line("capacity", client.results(job.id).summary["capacity"]), soft_wrap=True)
    console.print()
    return job.id


def take_picture(page: str, file: Path) -> None:
    """The top of a job's page, as it stands in a window of 1440 × 1000 pixels."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - it comes with the tests' tools

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        window = browser.new_page(viewport={"width": 1440, "height": 1000})
        window.goto(page)
        window.get_by_role("heading", name="Layers").first.wait_for()
        window.wait_for_load_state("networkidle")
        window.screenshot(path=file)
        browser.close()
    say(f"The page's picture: {file}")


def demo(*, once: bool, picture: Path | None) -> None:
    """The whole walk."""
    DATA.mkdir(parents=True, exist_ok=True)
    with service() as client:
        page = f"{client.url}/#/jobs/{run_job(client)}"
        if picture is not None:
            take_picture(page, picture)
            return
        if once:
            say(f"Its page was {page} (without ONCE=1 it stays)")
            return
        say(f"Its page: {page}   (ctrl-C ends the service)")
        signal.pause()


def main() -> int:
    """Run it; a failure is one sentence."""
    arguments = argparse.ArgumentParser(description="Run one job through the service, from nothing.")
    arguments.add_argument("--once", action="store_true", help="end the service after the table")
    arguments.add_argument("--picture", type=Path, help="take the page's picture into this file, and end")
    chosen = arguments.parse_args()
    # `kill` ends the demo as ctrl-C does, and with it the service
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        demo(once=chosen.once, picture=chosen.picture)
    except (DemoError, ClientError) as error:
        console.print(f"The demo stopped: {error}", style="bold red", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        say("Ended")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
