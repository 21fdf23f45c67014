"""How both HTTP floors run: uvicorn in one process with uvloop and httptools; no access log, no middleware."""

from __future__ import annotations

import socket
from typing import Any

import uvicorn

from benchmarks.processes import announce


def serve(app: Any) -> None:
    """Serve ``app`` on a free loopback port, announced on standard output, until SIGTERM or SIGINT."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        lifespan="off",
        access_log=False,
        log_level="warning",
        server_header=False,
        date_header=False,
        proxy_headers=False,
    )
    announce(listener.getsockname()[1])
    uvicorn.Server(config).run(sockets=[listener])
