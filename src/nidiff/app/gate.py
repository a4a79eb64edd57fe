"""The gate in front of gradio: it lets in the requests that the page itself makes, of bounded size."""

import asyncio
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LARGEST_FILE = 16 * 2**20  # bytes of a file that is sent
POSTED = {"queue/join": 2**16, "upload": LARGEST_FILE + 2**16, "cancel": 2**12, "reset": 2**12}  # bytes of a request
PATIENCE = 30.0  # seconds for a request to arrive
MOST_BYTES, BLOCK = 2**30, 2**14  # of all files that visitors have sent or drawn; what a file counts at least
FETCHED = re.compile(  # all that the page gets; a file by its path, not by an address that would be fetched
    r"/(config|theme\.css|favicon\.ico|robots\.txt|manifest\.json|(assets|static)/.*"
    r"|gradio_api/(queue/data|heartbeat/[A-Za-z0-9]{1,64}|startup-events|upload_progress|file=(?!\w+://).*))?"
)
SESSION = re.compile(r"[A-Za-z0-9]{1,64}")
LOCAL = ("127.0.0.1", "localhost", "[::1]")


class Gate:
    """ASGI middleware in front of gradio, which would also run an event past the queue, fetch a picture from an address
    that a visitor names, read a request of any length, keep any number of files in ``folder``, and answer another
    page that is open in the same browser. ``hosts`` are the names under which the page may be asked for; if empty, any.
    """

    def __init__(self, app: ASGIApp, *, hosts: tuple[str, ...], folder: Path) -> None:
        self.app, self.hosts, self.folder = app, hosts, folder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                receive = await self._checked(Request(scope, receive), receive)
            except HTTPException as refused:
                answer = JSONResponse({"detail": refused.detail}, refused.status_code)
                await answer(scope, receive, send)
                return
        await self.app(scope, receive, send)

    async def _checked(self, request: Request, receive: Receive) -> Receive:
        """How gradio may read the request, if it is let in."""
        path, host, length = (request.scope["path"], *map(request.headers.get, ("host", "content-length")))
        origin = request.headers.get("origin", f"http://{host}").partition("://")[2]
        is_ours = not self.hosts or (re.sub(r":\d+$", "", host or "") in self.hosts and origin == host)
        action, is_get = path.removeprefix("/gradio_api/").strip("/"), request.method in ("GET", "HEAD")
        if not is_ours or not (FETCHED.fullmatch(path) if is_get else action in POSTED):
            raise HTTPException(403, "only what the page itself asks for is answered: open http://127.0.0.1.")
        if is_get:
            return receive
        if length is None or int(length) > POSTED[action]:
            raise HTTPException(413, f"such a request has at most {POSTED[action] >> 10} KB: send less.")
        if action == "upload":
            if await asyncio.to_thread(is_full, self.folder):
                raise HTTPException(507, "visitors have sent as many files as fit here: try again in an hour.")
            return receive
        body = b""
        with suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(PATIENCE):
                body = await request.body()
        _check_body(action, body)
        whole = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def again() -> Message:
            return next(whole, None) or await receive()

        return again


def _check_body(action: str, body: bytes) -> None:
    """Refuse what no browser would send, and an address that would be fetched."""

    def check_file(value: dict[str, Any]) -> dict[str, Any]:
        if "://" in str(value.get("path")):
            raise HTTPException(403, "a file must be sent itself, not its address: choose one on your computer.")
        return value

    session = None
    with suppress(ValueError, RecursionError, AttributeError):
        session = json.loads(body, object_hook=check_file).get("session_hash", "none" if action == "reset" else None)
    if not isinstance(session, str) or not SESSION.fullmatch(session):
        raise HTTPException(400, "the request cannot be read or names no session: reload the page.")


def is_full(folder: Path) -> bool:
    """Whether files of visitors have taken their share of the disk."""
    total = 0
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):  # gradio has just deleted it
            total += max(BLOCK, file.stat().st_size)
    return total > MOST_BYTES
