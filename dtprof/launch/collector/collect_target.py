"""Where a run is sent, as `--collect` names it, and the token that the collector asks for."""

import os
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from dtprof import settings
from dtprof.errors import UsageError
from dtprof.launch.collector.http_sink import HttpSink
from dtprof.launch.collector.object_sink import ObjectSink
from dtprof.launch.collector.sinks import Sink

DEFAULT_PORT = 8266
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def read_token() -> str:
    """Return the token of the collector, from the environment or the file that it names; empty: there is none.

    Raises:
        UsageError: the file cannot be read, or others may read it.
    """
    given = os.environ.get(settings.ENV_COLLECT_TOKEN, "").strip()
    file = os.environ.get(settings.ENV_COLLECT_TOKEN_FILE, "")
    if given:
        return _checked(given, settings.ENV_COLLECT_TOKEN)
    return read_token_file(Path(file)) if file else ""


def read_token_file(file: Path) -> str:
    """Return the token in a file.

    Raises:
        UsageError: it cannot be read, is empty, or is no secret.
    """
    try:
        if file.stat().st_mode & 0o077:
            raise UsageError(f"{file} can be read by others; expected mode 600: chmod 600 {file}")
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the token in {file} cannot be read ({error}); give a file with one line") from error
    return _checked(token, str(file))


def _checked(token: str, where: str) -> str:
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError(f"{where} holds no token; expected one line of printable ASCII without spaces")
    return token


def make_sink(target: str) -> Sink:
    """Return the sink that `--collect` names.

    Raises:
        UsageError: it names none.
        MissingDependencyError: a package that the URL needs is not installed.
    """
    scheme = target.partition("://")[0] if "://" in target else ""
    if scheme and scheme not in ("http", "https"):
        return ObjectSink(target)
    address = urlsplit(target if scheme else f"//{target}")
    example = f"expected HOST:PORT, https://HOST:PORT, or a URL that fsspec knows: --collect collector:{DEFAULT_PORT}"
    try:
        host, port = address.hostname, address.port or DEFAULT_PORT
    except ValueError:
        host, port = None, 0
    if not host or address.path.strip("/") or address.username or address.query:
        raise UsageError(f"--collect (or {settings.COLLECT.env}) is {target.rpartition('@')[2]!r}; {example}")
    is_plain = scheme == "http" or (not scheme and host in LOOPBACK)
    token = read_token()
    if not token:
        raise UsageError(
            f"--collect needs the token of the collector; expected it in {settings.ENV_COLLECT_TOKEN_FILE} (a file of "
            f"mode 600) or {settings.ENV_COLLECT_TOKEN}"
        )
    return HttpSink(host, port, token=token, context=None if is_plain else _tls())


def _tls() -> ssl.SSLContext:
    file = os.environ.get(settings.ENV_COLLECT_CA) or None
    try:
        return ssl.create_default_context(cafile=file)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            f"{settings.ENV_COLLECT_CA} is {file!r}, which cannot be read ({error}); "
            "expected the certificate of the collector, or of who signed it"
        ) from error
