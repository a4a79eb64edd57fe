"""What is let in: the requests that the page itself makes, from this computer, of bounded size."""

import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

LARGEST = 5 * 2**20  # bytes of a request that sends no file
SENDS = ("queue/join", "upload", "component_server", "cancel", "reset")  # all that the page posts
LOCAL = ("127.0.0.1", "localhost", "[::1]")

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Gate:
    """In front of gradio, which would also run an event past the queue, fetch a picture from an address that a visitor
    names, read a request of any length, and, on this computer, answer a stranger's page that a browser takes for it."""

    def __init__(self, app: Any, *, is_local: bool) -> None:
        self.app, self.is_local = app, is_local

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name: value for name, value in scope["headers"]}
        host = re.sub(r":\d+$", "", headers.get(b"host", b"").decode("latin-1"))
        place = scope["path"].removeprefix("/gradio_api/")
        if self.is_local and host not in LOCAL:
            await _refuse(send, 403, "this page is for the computer it runs on: open it as http://127.0.0.1.")
        elif scope["method"] not in ("GET", "HEAD") and not place.startswith(SENDS):
            await _refuse(send, 403, "the page does not send this.")
        elif scope["method"] in ("GET", "HEAD") or place == "upload":
            await self.app(scope, receive, send)
        else:
            await self._bounded(scope, receive, send, place)

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
            await _refuse(
                send, 403, "a file must be sent, and not be named by an address: choose one on your computer."
            )
            return
        whole = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def again() -> Message:
            return next(whole, None) or await receive()

        await self.app(scope, again, send)


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
