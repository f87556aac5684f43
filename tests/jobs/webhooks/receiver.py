"""A webhook's server over TLS, with a certificate of an authority of its own, and the sender as a process."""

import contextlib
import os
import signal
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import trustme

from tests.machine.template.pasted import PASTED

KEY = "a key of webhooks that only the tests know"
SENDER = "import jobs.webhooks.__main__ as sender; sender._POLL_SECONDS = 0.1; raise SystemExit(sender.main())"
"""The sender as it runs, but that it looks ten times as often: most tests wait for several looks."""


class Handler(BaseHTTPRequestHandler):
    """What a receiver does with a request: it keeps it, and answers as the test says."""

    server: "Receiver"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        self.server.got.append((dict(self.headers.items()), body))
        status, headers = self.server.answer(self.path)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Receiver(ThreadingHTTPServer):
    """The server on one address of this machine."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, authority: trustme.CA, address: str = "127.0.0.1", *names: str, port: int = 0) -> None:
        self.connections = 0
        self.got: list[tuple[dict[str, str], str]] = []
        self.answer: Callable[[str], tuple[int, dict[str, str]]] = lambda _: (204, {})
        super().__init__((address, port), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(*(names or (address,))).configure_cert(context)
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.url = f"https://{names[0] if names else address}:{self.server_address[1]}/hook"

    def verify_request(self, *_: Any) -> bool:
        self.connections += 1
        return True

    def handle_error(self, *_: Any) -> None:
        """Say nothing of a handshake that was refused."""

    @contextlib.contextmanager
    def running(self) -> Iterator["Receiver"]:
        thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            self.server_close()
            thread.join()


@contextlib.contextmanager
def sending(
    url: str, folder: Path, authority: trustme.CA, hosts: str = "", program: str = SENDER
) -> Iterator[subprocess.Popen[bytes]]:
    """The sender of a ledger's webhooks; what it logs is in the folder, and it must end at SIGTERM."""
    authority.cert_pem.write_to_path(folder / "authority.pem")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KRONOSCOPE_")}
    environment = {
        **kept,
        "KRONOSCOPE_DATABASE_URL": url,
        "KRONOSCOPE_WEBHOOK_KEY": KEY,
        "KRONOSCOPE_WEBHOOK_HOSTS": hosts,
        "SSL_CERT_FILE": str(folder / "authority.pem"),
        "PYTHONWARNINGS": "error",
        "RES_OPTIONS": "timeout:1 attempts:1",  # for a name that no server knows, nor says so
    }
    with (folder / "sender.log").open("ab") as log:
        process = subprocess.Popen([*PASTED, program], env=environment, stdout=log, stderr=log)
    try:
        yield process
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=300) == 0, (folder / "sender.log").read_text()
    finally:
        process.kill()
        process.wait()
