"""The server of the live pages: a run, or the runs in a folder. It answers GET and HEAD, and writes nothing.

It listens on loopback by default; anywhere else a token is needed. On loopback only requests to a local
name are answered, so that no page of another site can read along by a name that it points here.
"""

import hmac
import ipaddress
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dtprof.errors import DtprofError, UsageError
from dtprof.monitor.run_monitor import describe_damage
from dtprof.monitor.web.page_feed import Feed
from dtprof.monitor.web.run_list import RunEntry, render_run_list, render_trouble
from dtprof.records.manifest import is_run
from dtprof.records.reader import open_run
from dtprof.records.run_facts import UNKNOWN, find_launcher, read_facts
from dtprof.report.pages import html_file

COOKIE = "dtprof-token"
IDLE_S = 60.0
"""After which a run without requests is closed."""
MAX_FEEDS = 8
"""Runs that are open at a time."""
COMPRESS_LEVEL = 1
"""Most responses are compressed already, or small."""
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

MakeFeed = Callable[[Path], Feed]


class Runs:
    """The runs on show; each is opened on the first request."""

    def __init__(self, path: Path, make_feed: MakeFeed) -> None:
        """Show a run, or all runs in a folder."""
        self._path, self._make_feed = path, make_feed
        self.is_one = is_run(path)
        self._feeds: dict[str, Feed] = {}
        self._lock = threading.Lock()

    @property
    def only(self) -> str | None:
        """The name of the one run, None where a folder of runs is shown."""
        return self._path.name if self.is_one else None

    def entries(self) -> list[RunEntry]:
        """Return the runs there are, the newest first."""
        try:
            entries = [_entry(child) for child in self._path.iterdir() if is_run(child)]
        except OSError:
            return []
        return sorted(entries, key=lambda entry: (-entry.facts.started_ns, entry.facts.name))

    def feed(self, name: str) -> Feed | None:
        """Return the feed of a run by its name; None where there is no such run.

        Raises:
            DtprofError: it cannot be read.
        """
        with self._lock:
            feed = self._feeds.get(name)
            if feed is None:
                path = self._path if self.is_one and name == self._path.name else self._path / name
                # The name must be that of a folder right there: nothing else can be read.
                if (self.is_one and name != self._path.name) or name != Path(name).name or not is_run(path):
                    return None
                feed = self._feeds[name] = self._make_feed(path)
            feed.asked = feed.now()
            for other in sorted(self._feeds, key=lambda run: -self._feeds[run].asked):
                idle = feed.now() - self._feeds[other].asked
                if other != name and (idle > IDLE_S or len(self._feeds) > MAX_FEEDS):
                    self._feeds.pop(other).close()
            return feed

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for feed in self._feeds.values():
                feed.close()
            self._feeds = {}


def make_app(runs: Runs, *, token: str | None) -> Starlette:
    """Return the application.

    Parameters:
        runs: to show.
        token: that requests must have; None on loopback, where the name they ask for must be a local one.
    """

    def index(_: Request) -> Response:
        if runs.only is not None:
            return RedirectResponse(f"run/{quote(runs.only)}/")
        return HTMLResponse(render_run_list(runs.entries()))

    def page(request: Request) -> Response:
        feed = runs.feed(request.path_params["name"])
        if feed is None:
            return trouble(request, _no_run(request), 404)
        source, pages, drawn, version = feed.first()
        return HTMLResponse(
            html_file.assemble_html(source.summary, pages, drawn, live_version=version, is_listed=not runs.is_one)
        )

    def documents(request: Request) -> Response:
        feed = runs.feed(request.path_params["name"])
        if feed is None:
            return PlainTextResponse(_no_run(request), 404)
        given = request.query_params.get("since", "0")
        if not given.isascii() or not given.isdigit() or len(given) > 15:
            return PlainTextResponse(f"since={given!r}: expected the number of a version", 400)
        return JSONResponse(feed.since(int(given), request.query_params.get("page", "")))

    def trouble(request: Request, sentence: str, status: int) -> Response:
        title = Path(request.path_params["name"]).name
        return HTMLResponse(render_trouble(title, sentence, is_listed=not runs.is_one), status)

    def failed(request: Request, error: Exception) -> Response:
        if request.url.path.endswith("/documents"):  # what asks shows it in the page that it is of
            return PlainTextResponse(str(error), 503)
        return trouble(request, str(error), 503)

    return Starlette(
        routes=[
            Route("/", index),
            Route("/run/{name}/", page),
            Route("/run/{name}/documents", documents),
        ],
        middleware=[
            Middleware(Guard, token=token),
            Middleware(GZipMiddleware, minimum_size=1024, compresslevel=COMPRESS_LEVEL),
        ],
        exception_handlers={DtprofError: failed},
    )


def _no_run(request: Request) -> str:
    return f"there is no run {request.path_params['name']} here (any more)"


class Guard:
    """Lets requests with the token pass, or on loopback those to a local name; adds the headers of every answer."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        """Guard an application."""
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    *((name.lower().encode(), value.encode()) for name, value in _HEADERS.items()),
                ]
            await send(message)

        answer = self._check(Request(scope))
        await (answer or self._app)(scope, receive, send_with_headers)

    def _check(self, request: Request) -> Response | None:
        """Return the response in place of the page; None where the request may pass."""
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("only GET and HEAD: nothing can be changed here", 405)
        if self._token is None:
            name = _without_port(request.headers.get("host", ""))
            if name in LOCAL_NAMES:
                return None
            return PlainTextResponse(f"asked for {name!r}; this server is known as {', '.join(LOCAL_NAMES)} alone", 421)
        given = request.query_params.get("token")
        if given is not None and hmac.compare_digest(given.encode(), self._token.encode()):
            answer = RedirectResponse(str(request.url.remove_query_params("token")))
            answer.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
            return answer
        if hmac.compare_digest(request.cookies.get(COOKIE, "").encode(), self._token.encode()):
            return None
        return PlainTextResponse("the address that `dtprof dashboard` printed has the token that is needed here", 403)


def _without_port(host: str) -> str:
    return host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host


def is_loopback(host: str) -> bool:
    """Say whether an address to listen on can be reached from this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        UsageError: the port is taken, or the address is none of this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
            listening.listen(128)
        except OSError:
            listening.close()
            raise
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"cannot listen on port {port} of {host} ({reason}); give another with --port P (0: any that is free), or "
            "another address with --host"
        ) from error
    return listening


def _entry(path: Path) -> RunEntry:
    facts = read_facts(path, path.name, is_alive=find_launcher(path)[0])
    trouble = ""
    if facts.outcome == UNKNOWN:
        try:
            run = open_run(path)
        except DtprofError as error:  # moved since, or of a newer format
            trouble = str(error)
        else:
            trouble = describe_damage(run.job_problem) if run.job_problem else ""
    return RunEntry(facts=facts, trouble=trouble)
