"""What is let in: the requests that the page itself makes, from this computer, of bounded size."""

import json
import re
from collections.abc import Awaitable, Callable
from itertools import islice
from pathlib import Path
from typing import Any

LARGEST = 5 * 2**20  # bytes of a request that sends no file
LARGEST_FILE = 16 * 2**20  # bytes of a file
HEADERS = 2**16  # bytes at most around a file in the request that sends it
MOST_FILES, MOST_BYTES = 2000, 2**30  # of what visitors have sent and drawn, until it is cleaned up
SENDS = ("queue/join", "upload", "component_server", "cancel", "reset")  # all that the page posts
OPENS = re.compile(  # all that it gets; a file by its path, not by an address that would be fetched
    r"/(config|theme\.css|favicon\.ico|robots\.txt|manifest\.json|(assets|static)/.*"
    r"|gradio_api/(queue/data|heartbeat/\w+|startup-events|upload_progress|file=(?!\w+://).*))?"
)
LOCAL = ("127.0.0.1", "localhost", "[::1]")

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Gate:
    """In front of gradio, which would also run an event past the queue, fetch a picture from an address that a visitor
    names, read a request of any length, keep any number of files in ``folder``, and, on this computer, answer a
    stranger's page that a browser takes for it."""

    def __init__(self, app: Any, *, is_local: bool, folder: Path) -> None:
        self.app, self.is_local, self.folder = app, is_local, folder

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = re.sub(r":\d+$", "", headers.get(b"host", ""))
        place, is_read = scope["path"].removeprefix("/gradio_api/"), scope["method"] in ("GET", "HEAD")
        if self.is_local and host not in LOCAL:
            await _refuse(send, 403, "this page is for the computer it runs on: open it as http://127.0.0.1.")
        elif not (OPENS.fullmatch(scope["path"]) if is_read else place.startswith(SENDS)):
            await _refuse(send, 403, "only what the page itself asks for is answered.")
        elif is_read:
            await self.app(scope, receive, send)
        elif place == "upload":
            await self._upload(scope, receive, send, headers.get(b"content-length", ""))
        else:
            await self._bounded(scope, receive, send, place)

    async def _upload(self, scope: Message, receive: Receive, send: Send, length: str) -> None:
        if not length.isdecimal() or int(length) > LARGEST_FILE + HEADERS:
            await _refuse(send, 413, f"a file may have at most {LARGEST_FILE >> 20} MB: choose a smaller one.")
        elif is_full(self.folder):
            await _refuse(send, 507, "visitors have sent as many files as fit here: try again in an hour.")
        else:
            await self.app(scope, receive, send)

    async def _bounded(self, scope: Message, receive: Receive, send: Send, place: str) -> None:
        """Read all of a request, and hand it on if it is not too long and names nothing to be fetched."""
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
            if len(body) > LARGEST:
                await _refuse(send, 413, f"a request has at most {LARGEST >> 20} MB: send less.")
                return
        if place == "queue/join" and _fetches(body):
            await _refuse(send, 403, "a file must be sent itself, not its address: choose one on your computer.")
            return
        whole = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def again() -> Message:
            return next(whole, None) or await receive()

        await self.app(scope, again, send)


def is_full(folder: Path) -> bool:
    """Whether files of visitors have taken their share of the disk."""
    try:
        sizes = [file.stat().st_size for file in islice(folder.rglob("*"), MOST_FILES + 1)]
    except FileNotFoundError:  # one has just been cleaned up
        return False
    return len(sizes) > MOST_FILES or sum(sizes) > MOST_BYTES


def _fetches(body: bytes) -> bool:
    """Whether a request names a file by its address on a network."""
    try:
        return _has_address(json.loads(body))
    except (ValueError, RecursionError):
        return True  # nothing that a browser would send


def _has_address(value: Any) -> bool:
    if isinstance(value, dict):
        path = value.get("path")
        return (isinstance(path, str) and "://" in path) or any(map(_has_address, value.values()))
    return isinstance(value, list) and any(map(_has_address, value))


async def _refuse(send: Send, status: int, sentence: str) -> None:
    body = json.dumps({"detail": sentence}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
