"""Serve the metrics of a node over HTTP, where a Prometheus server scrapes them."""

import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dtprof.interchange.metric_families import CONTENT_TYPE

PATH = "/metrics"
REQUEST_TIMEOUT_S = 10
MAX_REQUESTS = 8
"""Requests answered at one time; further ones are refused."""


class MetricsServer:
    """Answers /metrics with the newest text, in threads of the launcher, until it is stopped."""

    def __init__(self, address: str, port: int) -> None:
        """Listen at once; port 0 takes any that is free.

        Raises:
            OSError: the address cannot be had.
        """
        server_class = _ServerV6 if ":" in address else _Server
        self._server = server_class((address, port), _Handler)
        self._address = address
        self._thread = threading.Thread(target=self._server.serve_forever, name="dtprof-metrics-http", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it answers."""
        host = f"[{self._address}]" if ":" in self._address else self._address
        return f"http://{host}:{self._server.server_address[1]}{PATH}"

    def show(self, text: bytes) -> None:
        """Answer with this from now on."""
        self._server.body = text

    def stop(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    body = b""

    def __init__(self, *arguments: Any) -> None:
        self._slots = threading.BoundedSemaphore(MAX_REQUESTS)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: who asked has gone away."""


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_TIMEOUT_S
    server_version = "dtprof"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer a scrape."""
        if self.path.split("?")[0] == PATH:
            status = HTTPStatus.OK if self.server.body else HTTPStatus.SERVICE_UNAVAILABLE
            self._answer(status, self.server.body, CONTENT_TYPE)
        else:
            self._answer(HTTPStatus.NOT_FOUND, f"dtprof: metrics are at {PATH}\n".encode(), "text/plain")

    def do_HEAD(self) -> None:
        """Answer a HEAD request as a scrape would be."""
        self.do_GET()

    def _answer(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing: the terminal belongs to the job."""
