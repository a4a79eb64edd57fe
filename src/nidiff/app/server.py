"""Serve the page on this computer."""

import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from nidiff.app.gate import LARGEST_FILE, LOCAL, Gate
from nidiff.app.shelf import Shelf
from nidiff.errors import InputError, first_line, shown

LOOPBACK, FIRST, PORTS = "127.0.0.1", 7860, 100
WAITING = 100  # requests in the queue; one more is told to come again


def free_port(host: str, port: int | None) -> int:
    """``port`` if nobody listens there, or the first free one from 7860 on."""
    if port is not None and not 0 <= port < 2**16:
        raise InputError(f"port={port} must be from 0 to {2**16 - 1}.")
    address = address_of(host)
    for one in range(FIRST, FIRST + PORTS) if port is None else [port]:
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((address, one))
            except OSError as error:
                reason = error.strerror
            else:
                return int(trial.getsockname()[1])
    if port is not None:
        raise InputError(f"port={port} cannot be used on {host} ({reason}): give another, or leave it out.")
    raise InputError(f"no port from {FIRST} to {FIRST + PORTS - 1} can be used on {host} ({reason}): give another.")


def address_of(host: str) -> str:
    """The address, such as 127.0.0.1, of a name."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # the last of a name that no system can look up
        remedy = "give one of this computer, such as 127.0.0.1, or leave it out"
        raise InputError(f"host={shown(host)} is not an IPv4 address ({first_line(error)}): {remedy}.") from error
    return str(found[0][4][0])


@contextmanager
def serving(shelf: Shelf, host: str = LOOPBACK, port: int | None = None) -> Iterator[str]:
    """The address of the page about what is on the shelf, while it is served. Its files for download are gone when it
    ends."""
    free_port(host, port)  # what cannot be is said at once, and not after all that is imported
    with tempfile.TemporaryDirectory(prefix="nidiff-explore-", ignore_cleanup_errors=True) as cache:
        os.environ |= _settings(host, cache)  # read when gradio is imported
        import torch
        from starlette.middleware import Middleware

        from nidiff.app.look import HEAD, theme
        from nidiff.app.page import build
        from nidiff.app.work import begin, end_all

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))  # two requests are worked on at a time
        begin()
        blocks = build(shelf)
        blocks.queue(max_size=WAITING, default_concurrency_limit=1, api_open=False)
        looks: dict[str, Any] = {"theme": theme(), "head": HEAD, "footer_links": []}
        bounds: dict[str, Any] = {"max_file_size": LARGEST_FILE, "state_session_capacity": 200, "strict_cors": True}
        closed: dict[str, Any] = {"share": False, "ssr_mode": False, "pwa": False, "mcp_server": False}
        hosts = (*LOCAL, host) if ip_address(address_of(host)).is_loopback else ()
        port = free_port(host, port)
        try:
            try:
                _, url, _ = blocks.launch(
                    server_name=host,
                    server_port=port,
                    prevent_thread_lock=True,
                    show_error=True,
                    quiet=True,
                    enable_monitoring=False,
                    app_kwargs={"middleware": [Middleware(Gate, hosts=hosts, folder=Path(cache))]},
                    **looks,
                    **bounds,
                    **closed,
                )
            except OSError as error:
                raise InputError(f"port={port} was taken while the page was prepared: start it again.") from error
            yield url
        finally:
            end_all()
            blocks.close(verbose=False)


def _settings(host: str, cache: str) -> dict[str, str]:
    """What gradio and its client look for in the environment."""
    direct = ",".join(filter(None, [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), host]))
    return {
        "GRADIO_TEMP_DIR": cache,
        "GRADIO_EXAMPLES_CACHE": f"{cache}/examples",  # else a folder of the working directory could be read
        "GRADIO_ANALYTICS_ENABLED": "False",
        "GRADIO_RUN_HISTORY": "False",  # a browser need not keep what its visitor did
        "no_proxy": direct,
        "NO_PROXY": direct,
    }


def interrupt() -> threading.Event:
    """What Ctrl-C sets from now on, or a signal that asks this process to end."""
    over = threading.Event()
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # the last is not everywhere
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda *_: over.set())
    return over
