"""The collector as an HTTP service: who may send, how much at a time, and what is answered.

Bodies are read piece by piece, so a request takes little memory however long it is, and a sender waits where the
service is busy: TCP holds it back. Every answer says how often the newest, unsealed records may come
(`tail_every_s`): the busier the service, the seldomer. Sealed segments come as archives that are kept as they are, and
cost it little.
"""

import hmac
import json
import time
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dtprof.formatting import join_lines
from dtprof.launch.collector.run_store import MOST_MANIFEST_BYTES, MOST_PIECES_BYTES, Refusal, RunStore, read_opening
from dtprof.records.run_files import FileKind

MOST_LINES_BYTES = 2 << 20
MOST_FILE_BYTES = 512 << 20
LEAST_TAIL_S, MOST_TAIL_S = 1.0, 120.0
BUSY, IDLE = 0.5, 0.25
"""Shares of one core, worked or waited for: above the first tails come seldomer, below the second more often."""
POLL_INTERVAL_S = 2.0

RouteHandler = Callable[[Request], Awaitable[Response]]


class Load:
    """How busy this process is, and how often tails may come therefore."""

    def __init__(self) -> None:
        """Begin with as many as there can be."""
        self.tail_every_s = LEAST_TAIL_S
        self._seen_s, self._worked_s = time.monotonic(), _wanted_s()

    def poll(self) -> float:
        """Return after how many seconds a sender may send its newest records again."""
        now_s = time.monotonic()
        if now_s - self._seen_s >= POLL_INTERVAL_S:
            worked_s = _wanted_s()
            share = (worked_s - self._worked_s) / (now_s - self._seen_s)
            if share > BUSY:
                self.tail_every_s = min(MOST_TAIL_S, 2 * self.tail_every_s)
            elif share < IDLE:
                self.tail_every_s = max(LEAST_TAIL_S, self.tail_every_s / 1.5)
            self._seen_s, self._worked_s = now_s, worked_s
        return self.tail_every_s


def make_app(store: RunStore, *, token: str, note: Callable[[str], None]) -> Starlette:
    """Return the service.

    Parameters:
        token: that a sender must know.
        note: called with a sentence about what was refused.
    """
    load = Load()
    reported: set[str] = set()

    def tell(text: str) -> None:
        text = join_lines([text])  # names of hosts and runs are what a sender says
        if len(reported) < 1000 and text not in reported:
            reported.add(text)
            note(text)

    def guarded(handle: RouteHandler) -> RouteHandler:
        async def handler(request: Request) -> Response:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                tell(f"a sender at {_client(request)} has another token: refused")
                return JSONResponse({"error": "the token is not that of the collector"}, 401)
            try:
                return await handle(request)
            except Refusal as refusal:
                if refusal.status not in (404, 416):
                    tell(f"{_client(request)}: {refusal}")
                return JSONResponse({"error": str(refusal)}, refusal.status)
            except ClientDisconnect:
                return Response(status_code=400)  # nobody is there to read it
            except OSError as error:
                tell(f"a file cannot be written ({error.strerror})")
                return JSONResponse({"error": f"the collector cannot write ({error.strerror})"}, 507)

        return handler

    def answer(**fields: object) -> Response:
        return Response(json.dumps({**fields, "tail_every_s": load.poll()}), media_type="application/json")

    async def open_run(request: Request) -> Response:
        given = read_opening(await _body(request, MOST_MANIFEST_BYTES))
        name, files = store.open(given)
        tell(f"{given.host} sends {name}")
        return answer(run=name, files=files)

    async def put_manifest(request: Request) -> Response:
        store.put_manifest(request.path_params["launcher"], await _body(request, MOST_MANIFEST_BYTES))
        return answer()

    async def end(request: Request) -> Response:
        store.end(request.path_params["launcher"])
        return answer()

    async def put(request: Request) -> Response:
        target, growth = _target(request)
        if growth is FileKind.SEGMENT:
            raise Refusal(400, "a segment is sent in pieces")
        length = _number(request, "content-length", request.headers.get("content-length"))
        if length > MOST_FILE_BYTES:
            raise Refusal(413, f"a file of {length} bytes; expected at most {MOST_FILE_BYTES}")
        store.check_room(length)
        draft = store.draft(target)
        try:
            size, checksum = await _write(request, draft)
            _check_whole(request, size, length, checksum)
            store.put(draft, target, growth, mtime_ns=_number(request, "mtime", request.query_params.get("mtime")))
        finally:
            draft.unlink(missing_ok=True)
        return answer()

    async def patch(request: Request) -> Response:
        target, growth = _target(request)
        most = MOST_PIECES_BYTES if growth is FileKind.SEGMENT else MOST_LINES_BYTES
        body = await _body(request, most)
        if growth is FileKind.SEGMENT:
            store.write_pieces(target, body)
            return answer()
        if growth is not FileKind.LINES:
            raise Refusal(400, f"{target.name} is sent as a whole")
        return answer(size=store.append(target, _number(request, "at", request.query_params.get("at")), body))

    async def delete(request: Request) -> Response:
        store.delete(*_target(request))
        return answer()

    def _target(request: Request) -> tuple[Path, FileKind]:
        found = request.path_params
        return store.target(found["launcher"], found["folder"], found["file"])

    file = "/v1/launchers/{launcher}/{folder}/{file}"
    return Starlette(
        routes=[
            Route("/v1/launchers", guarded(open_run), methods=["POST"]),
            Route("/v1/launchers/{launcher}/manifest", guarded(put_manifest), methods=["PUT"]),
            Route("/v1/launchers/{launcher}/end", guarded(end), methods=["POST"]),
            Route(file, guarded(put), methods=["PUT"]),
            Route(file, guarded(patch), methods=["PATCH"]),
            Route(file, guarded(delete), methods=["DELETE"]),
        ]
    )


async def _body(request: Request, most: int) -> bytes:
    """Read a body of limited length.

    Raises:
        Refusal: it is longer, or was cut or changed on the way.
    """
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise Refusal(413, f"a body of more than {most} bytes")
        parts.append(part)
    body = b"".join(parts)
    length = _number(request, "content-length", request.headers.get("content-length"))
    _check_whole(request, size, length, zlib.crc32(body))
    return body


async def _write(request: Request, draft: Path) -> tuple[int, int]:
    """Write a body into a file as it comes; return its length and CRC-32."""
    size = checksum = 0
    draft.unlink(missing_ok=True)
    with draft.open("xb", buffering=0) as stream:
        async for part in request.stream():
            size += len(part)
            if size > MOST_FILE_BYTES:
                raise Refusal(413, f"a file of more than {MOST_FILE_BYTES} bytes")
            checksum = zlib.crc32(part, checksum)
            stream.write(part)
    return size, checksum


def _check_whole(request: Request, size: int, length: int, checksum: int) -> None:
    """Refuse a body that was cut or changed on the way."""
    if size != length:
        raise Refusal(400, f"only {size} of {length} bytes came: nothing of them was taken; they are sent again")
    if f"{checksum:08x}" != (given := request.headers.get("x-crc32")):
        raise Refusal(
            400,
            f"{size} bytes were changed on the way (checksum {checksum:08x}, expected {given}): "
            "nothing of them was taken; they are sent again",
        )


def _number(request: Request, name: str, text: str | None) -> int:
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 19:
        raise Refusal(400, f"{name} is {text!r}; expected a number in {request.url.path}")
    return int(text)


def _wanted_s() -> float:
    """Return how long this process has worked, and its thread waited for a core that others had."""
    try:
        delay_ns = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        delay_ns = 0
    return time.process_time() + delay_ns / 1e9


def _client(request: Request) -> str:
    return request.client.host if request.client else "an unknown address"
