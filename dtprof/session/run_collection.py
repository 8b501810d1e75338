"""Keep the runs that launchers of other hosts send, and send a run that was kept on a host."""

import os
import secrets
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtprof.errors import OutputError, UsageError
from dtprof.records import paths, writer
from dtprof.records.manifest import read_document, read_manifest

TOKEN_FILE = ".collect-token"
MOST_CONNECTIONS = 4096


@dataclass(frozen=True, kw_only=True)
class CollectorSettings:
    """Where a collector listens, what it keeps, and how it is protected."""

    store: Path
    host: str
    port: int
    max_gb: float = 0.0
    certificate: Path | None = None
    key: Path | None = None
    is_plain: bool = False  # other hosts may send without TLS


def serve_collector(
    settings: CollectorSettings, *, say: Callable[[str], None], announce: Callable[[str], None]
) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Parameters:
        announce: called with the address once runs can be sent to it.

    Raises:
        UsageError: the port is taken, TLS is missing or its files are none, or the token is no secret.
        OutputError: the folder cannot be written to.
    """
    from dtprof.launch.collector.collect_service import make_app
    from dtprof.launch.collector.run_store import RunStore
    from dtprof.monitor.web.web_server import is_loopback, listen
    from dtprof.session.uvicorn_server import address_of, serve

    if settings.certificate is None and not is_loopback(settings.host) and not settings.is_plain:
        raise UsageError(
            f"--listen {settings.host} lets other hosts send, and there is no certificate: token and records would "
            "cross the network unprotected; expected --tls-cert and --tls-key, or --plain on a network that you trust"
        )
    _check_tls(settings)
    try:
        store = RunStore(settings.store.absolute(), max_bytes=int(settings.max_gb * 2**30))
        token, origin = _token(settings.store)
    except OSError as error:
        raise OutputError(f"{settings.store} cannot be written to ({error.strerror}); give a folder with -o") from error
    scheme = "http" if settings.certificate is None else "https"
    with listen(settings.host, settings.port) as listening:
        announce(f"{scheme}://{address_of(listening, settings.host)}")
        say(f"runs are kept in {settings.store}; the token is {origin}")
        serve(
            make_app(store, token=token, note=say),
            listening,
            http="h11",
            ws="none",
            limit_concurrency=MOST_CONNECTIONS,
            timeout_keep_alive=120,
            ssl_certfile=settings.certificate,
            ssl_keyfile=settings.key,
        )


def send_runs(runs: Sequence[Path], target: str, *, say: Callable[[str], None]) -> list[str]:
    """Send runs that lie on this host, or all in a folder of runs, as far as they have not been; return what failed.

    Raises:
        UsageError: the target is none, or the token is missing.
    """
    from dtprof.launch.collector import collect_target, run_sender, sinks

    problems: list[str] = []
    for run in _runs_in(runs):
        state = read_document(run / paths.SENT)
        if state.get("is_complete") and state.get("target") == target:
            continue
        sink = collect_target.make_sink(target)
        card = run_sender.new_card(
            run,
            is_named=bool(state.get("is_named", False)),
            job=state.get("job") if state else read_manifest(run).job,
            joins=bool(state.get("joins", False)),
            host=str(state.get("host") or _host(run)),
        )
        sender = run_sender.RunSender(run, sink, card)
        try:
            sender.sync(is_last=True)
            say(f"{run} sent as {sender.progress.name}")
        except (sinks.SinkError, sinks.SinkRefusedError, OSError) as error:
            problems.append(f"{run}: {error}")
        finally:
            sink.close()
            run_sender.keep_state(run, sender, target)
    return problems


def _runs_in(given: Sequence[Path]) -> list[Path]:
    found = []
    for path in given:
        if (path / paths.MANIFEST).is_file():
            found.append(path)
            continue
        inner = sorted(one for one in path.iterdir() if (one / paths.MANIFEST).is_file()) if path.is_dir() else []
        if not inner:
            raise UsageError(
                f"--send is {str(path)!r}, which holds no run; expected a run directory, or a folder of runs"
            )
        found += inner
    return found


def _host(run: Path) -> str:
    return next(iter(read_manifest(run).hosts), writer.host_name())


def _token(store: Path) -> tuple[str, str]:
    """Return the token of the collector and where it comes from; a new one is written where there is none."""
    from dtprof.launch.collector.collect_target import read_token, read_token_file

    if given := read_token():
        return given, "that of the environment"
    file = store / TOKEN_FILE
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return read_token_file(file), f"in {file}"
    with os.fdopen(descriptor, "w") as stream:
        stream.write(secrets.token_urlsafe(32) + "\n")
    return read_token_file(file), f"in {file}, made now: give it to launchers by DTPROF_COLLECT_TOKEN_FILE"


def _check_tls(settings: CollectorSettings) -> None:
    if (settings.certificate is None) != (settings.key is None):
        raise UsageError("--tls-cert and --tls-key belong together; expected both or none")
    if settings.certificate is None or settings.key is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.certificate, settings.key)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            f"--tls-cert {settings.certificate} and --tls-key {settings.key} cannot be used ({error}); "
            "expected a certificate and its key in PEM"
        ) from error
