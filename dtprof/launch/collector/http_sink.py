"""Send a run to a `dtprof collect`, over HTTP or TLS."""

import http.client
import json
import ssl
import zlib
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from dtprof.formatting import join_lines
from dtprof.launch.collector.sinks import (
    LauncherCard,
    Opened,
    SinkError,
    SinkFullError,
    SinkRefusedError,
    UnknownLauncherError,
)

CONNECT_S = 5.0
ANSWER_S = 30.0
MOST_ANSWER_BYTES = 16 << 20
BLOCK_BYTES = 1 << 20


class HttpSink:
    """A collector."""

    def __init__(self, host: str, port: int, *, token: str, context: ssl.SSLContext | None) -> None:
        """Prepare; nothing is sent yet."""
        self.tail_every_s = 1.0
        self._host, self._port, self._context = host, port, context
        self._headers = {"Authorization": f"Bearer {token}"}
        self._connection: http.client.HTTPConnection | None = None
        self._base = ""

    def open(self, card: LauncherCard) -> Opened:
        """Begin, or go on after either end was gone."""
        body = json.dumps(card.document()).encode()
        answer = self._ask("POST", "/v1/launchers", body)
        self._base = f"/v1/launchers/{card.launcher}"
        files = {str(name): (int(size), int(mtime)) for name, (size, mtime) in answer.get("files", {}).items()}
        return Opened(name=str(answer.get("run", card.name)), files=files)

    def put(self, name: str, data: bytes | Path, *, mtime_ns: int) -> None:
        """Send a whole file."""
        path = f"{self._base}/{quote(name)}?mtime={mtime_ns}"
        if isinstance(data, bytes):
            self._ask("PUT", path, data)
            return
        # A profiler window may have hundreds of MiB: it is read twice, and never held as a whole.
        with data.open("rb") as stream:
            checksum = size = 0
            while block := stream.read(BLOCK_BYTES):
                checksum, size = zlib.crc32(block, checksum), size + len(block)
            stream.seek(0)
            self._ask("PUT", path, stream, checksum=checksum, size=size)

    def put_manifest(self, data: bytes) -> None:
        """Send the manifest of the launcher."""
        self._ask("PUT", f"{self._base}/manifest", data)

    def append(self, name: str, at: int, data: bytes) -> int:
        """Append lines at an offset; return the size that the other end has now."""
        return int(self._ask("PATCH", f"{self._base}/{quote(name)}?at={at}", data).get("size", at))

    def patch(self, name: str, packed: bytes) -> None:
        """Send records of a segment."""
        self._ask("PATCH", f"{self._base}/{quote(name)}", packed)

    def delete(self, name: str) -> None:
        """Remove a file."""
        self._ask("DELETE", f"{self._base}/{quote(name)}", b"")

    def end(self) -> None:
        """Say that everything was sent."""
        self._ask("POST", f"{self._base}/end", b"")

    def close(self) -> None:
        """Let go of the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(
        self, method: str, path: str, body: bytes | BinaryIO, *, checksum: int | None = None, size: int = 0
    ) -> dict[str, Any]:
        """Send a request; `checksum` and `size` are those of a body that is a stream."""
        if isinstance(body, bytes):
            checksum, size = zlib.crc32(body), len(body)
        headers = {**self._headers, "X-Crc32": f"{checksum:08x}", "Content-Length": str(size)}
        try:
            connection = self._connect()
            connection.request(method, path, body=body, headers=headers)
            response = connection.getresponse()
            data = response.read(MOST_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            reason = getattr(error, "strerror", None) or getattr(error, "verify_message", None) or error
            raise SinkError(
                f"{self._host}:{self._port} cannot be reached ({reason or type(error).__name__})"
            ) from error
        try:
            answer = json.loads(data)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise SinkError(
                f"{self._host}:{self._port} does not answer as `dtprof collect` does (HTTP {response.status})"
            )
        if response.status == 200:
            every_s = answer.get("tail_every_s")
            self.tail_every_s = float(every_s) if isinstance(every_s, int | float) else self.tail_every_s
            return answer
        reason = join_lines([str(answer.get("error", f"HTTP {response.status}"))[:300]])  # goes to the user's terminal
        if response.status == 404:
            raise UnknownLauncherError(reason)
        if response.status == 507:
            raise SinkFullError(reason)
        if response.status == 416 and reason.isdigit():
            return {"size": int(reason)}
        if response.status in (401, 409) or path == "/v1/launchers":
            raise SinkRefusedError(reason)
        raise SinkError(reason)

    def _connect(self) -> http.client.HTTPConnection:
        if self._connection is None:
            if self._context is None:
                connection = http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_S)
            else:
                connection = http.client.HTTPSConnection(
                    self._host, self._port, timeout=CONNECT_S, context=self._context
                )
            connection.connect()
            connection.sock.settimeout(ANSWER_S)
            self._connection = connection
        return self._connection
