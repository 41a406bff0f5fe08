"""`psearch serve`: open an index, compile what queries need, and answer until the process is told to stop."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

from psearch_jax.errors import UserError
from psearch_jax.retrieval.collection_search import SearchOptions, open_index
from psearch_jax.retrieval.reranking import load_reranker
from psearch_jax.retrieval.searcher import local_mesh

LOOPBACK = ("127.0.0.1", "::1", "localhost")
GRACE = 20  # seconds that running requests get when the server is stopped
#: Seconds that a connection may be idle. Clients and balancers let go of one after 5 to 60; a server that did it first
#: would now and then close one on which a request is under way.
KEEP_ALIVE = 75


def run(
    directory: Path,
    *,
    host: str,
    port: int,
    topk: int,
    encoder: str,
    reranker: str,
    rerank_depth: int,
    device_matrix: str,
    batch: int,
    queue: int,
    deadline: float,
    max_bytes: int,
    token_variable: str,
    no_verify: bool,
) -> None:
    """Serve an index. SIGTERM and Ctrl-C: no further connections, what runs is answered.

    Raises:
      UserError: the extra `serve` is not installed, the index cannot be opened, or the address is taken.
    """
    try:
        import uvicorn

        from psearch_jax.retrieval.server import ServerLimits, make_app
    except ImportError as error:
        raise UserError(
            f"The package {error.name} is not installed; run `pip install 'psearch_jax[serve]'`."
        ) from error
    with _listen(host, port) as listening:
        with_ = load_reranker(reranker, part="contents") if reranker else None
        options = SearchOptions(
            device_matrix=device_matrix,
            mesh=local_mesh() if device_matrix != "none" else None,
            reranker=with_,
            rerank_depth=rerank_depth,
            verify=not no_verify,
        )
        searcher = open_index(directory, options, encoder=encoder, follow=True)
        searcher.warm_up()
        token = os.environ.get(token_variable, "") if token_variable else ""
        limits = ServerLimits(
            topk=topk, batch=batch, capacity=queue, deadline=deadline, max_bytes=max_bytes
        )
        app = make_app(searcher, limits=limits, reranker=with_, token=token)
        address = f"http://{host}:{listening.getsockname()[1]}"
        if host not in LOOPBACK and not token:
            _say(
                f"everybody who reaches {address} can search: set {token_variable} to ask for a token"
            )
        _say(
            f"{len(searcher):,} passages, index {searcher.fingerprint}, at {address} (docs: {address}/docs)"
        )
        settings: dict[str, Any] = {
            "log_level": "warning",
            "timeout_graceful_shutdown": GRACE,
            "timeout_keep_alive": KEEP_ALIVE,
        }
        uvicorn.Server(uvicorn.Config(app, backlog=2048, **settings)).run(sockets=[listening])
        _say("stopped")


def _listen(host: str, port: int) -> socket.socket:
    """Take the address before minutes go into loading."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise UserError(
            f"http://{host}:{port} cannot be listened at ({error.strerror}); choose another --port or --host."
        ) from error


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
