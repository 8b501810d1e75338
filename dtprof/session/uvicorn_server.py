"""The server of the live pages, and of the runs that other hosts send: uvicorn, with fewer wake-ups."""

import asyncio
import contextlib
import socket
from typing import Any

import uvicorn
from starlette.applications import Starlette

TICK_S = 0.5
"""After which Ctrl-C ends the server at the latest."""


class LowWakeupServer(uvicorn.Server):
    """Wake twice a second without requests: uvicorn wakes ten times, a tenth of the cost of watching."""

    async def main_loop(self) -> None:
        """Wait for the end."""
        while not self.should_exit:
            await asyncio.sleep(TICK_S)


def serve(app: Starlette, listening: socket.socket, **options: Any) -> None:
    """Serve until Ctrl-C or SIGTERM; `options` are of uvicorn.Config."""
    config = uvicorn.Config(app, log_level="error", access_log=False, lifespan="off", **options)
    with contextlib.suppress(KeyboardInterrupt):
        LowWakeupServer(config).run(sockets=[listening])


def address_of(listening: socket.socket, host: str) -> str:
    """Return host and port as a URL has them."""
    port = listening.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
