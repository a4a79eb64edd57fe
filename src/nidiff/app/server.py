"""Serve the page on this computer."""

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

from nidiff.app.shelf import Shelf
from nidiff.errors import InputError, first_line
from nidiff.recipe import check_whole

FIRST, PORTS = 7860, 100
WAITING = 100  # requests in the queue; one more is told to come again


def free_port(host: str, port: int | None) -> int:
    """``port`` if nobody listens there, or the first free one from 7860 on."""
    ports = range(FIRST, FIRST + PORTS) if port is None else [check_whole("port", port, 0, 2**16 - 1)]
    address = address_of(host)
    for number in ports:
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((address, number))
            except OSError as error:
                reason = error.strerror
            else:
                return int(trial.getsockname()[1])
    raise InputError("port", number, f"cannot be used on {host} ({reason})", "give another")


def address_of(host: str) -> str:
    """The address, such as 127.0.0.1, of a name."""
    try:
        addresses = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # the last of a name that no system can look up
        remedy = "give one of this computer, such as 127.0.0.1, or leave it out"
        raise InputError("host", host, f"is not an IPv4 address ({first_line(error)})", remedy) from error
    return str(addresses[0][4][0])


def serve(shelf: Shelf, host: str, port: int | None, announce: Callable[[str], None]) -> None:
    """Serve the page about what is on the shelf until Ctrl-C, or a signal that asks this process to end, and end it.
    ``announce`` is called with the address of the page."""
    over = threading.Event()
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # the last is not everywhere
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda *_: over.set())
    with _serving(shelf, host, port) as url:
        announce(url)
        over.wait()
    print("stopped", file=sys.stderr, flush=True)
    os._exit(0)  # a thread of gradio may still be in torch, which aborts if Python is taken down around it


@contextmanager
def _serving(shelf: Shelf, host: str, port: int | None) -> Iterator[str]:
    """Serve the page, and yield its address. In the end its files for download are gone."""
    free_port(host, port)  # a bad address is refused now, before the slow imports
    with tempfile.TemporaryDirectory(prefix="nidiff-explore-", ignore_cleanup_errors=True) as cache:
        os.environ |= _settings(host, cache)  # read when gradio is imported
        import torch
        from gradio.utils import get_space
        from starlette.middleware import Middleware

        from nidiff.app.gate import LOCAL, Gate
        from nidiff.app.layout import HEAD, theme
        from nidiff.app.page import build
        from nidiff.app.work import closing

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))  # two requests are worked on at a time
        blocks = build(shelf)
        blocks.queue(max_size=WAITING, default_concurrency_limit=1, api_open=False)
        hosts = (*LOCAL, host) if ip_address(address_of(host)).is_loopback else ()
        gate = Middleware(
            Gate, hosts=hosts, folder=Path(cache), frame="https://huggingface.co" if get_space() else None
        )
        try:
            _, url, _ = blocks.launch(
                server_name=host,
                server_port=free_port(host, port),
                prevent_thread_lock=True,
                show_error=True,
                quiet=True,
                theme=theme(),
                head=HEAD,
                footer_links=[],
                state_session_capacity=200,
                strict_cors=True,
                enable_monitoring=False,
                share=False,
                ssr_mode=False,
                pwa=False,
                mcp_server=False,
                app_kwargs={"middleware": [gate]},
            )
            for name in ("uvicorn.error", "python_multipart"):  # which log whatever they cannot read
                logging.getLogger(name).setLevel(logging.ERROR)
            yield url
        finally:
            closing.set()
            blocks.close(verbose=False)


def _settings(host: str, cache: str) -> dict[str, str]:
    """The environment variables of gradio and its client."""
    direct = ",".join(filter(None, [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), host]))
    return {
        "GRADIO_TEMP_DIR": cache,
        "GRADIO_EXAMPLES_CACHE": f"{cache}/examples",  # else a folder of the working directory could be read
        "GRADIO_ANALYTICS_ENABLED": "False",
        "GRADIO_RUN_HISTORY": "False",  # a browser need not keep what its visitor did
        "no_proxy": direct,
        "NO_PROXY": direct,
    }
