"""The gate in front of gradio: it lets in the requests that the page itself makes, of bounded size."""

import asyncio
import json
import re
from base64 import b64encode
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from starlette.datastructures import MutableHeaders
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
NO_SESSION = b'"session_not_found":true'  # in the first words of the queue to a session that it does not know
INLINE = re.compile(rb"<script(?![^>]*\ssrc=)[^>]*>(.*?)</script>", re.DOTALL)
# Beyond files of this server gradio needs functions made of text ('unsafe-eval': templates of gr.HTML, our IS_DARK),
# styles, pictures in the page, and the scripts of the page as it is sent, here by their checksums. No other may run.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-eval' {}; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "object-src 'none'; base-uri 'self'; form-action 'none'; frame-ancestors {}"
)
UNREADABLE = "the request cannot be read, or is for no session or event of this page: reload the page."
LOCAL = ("127.0.0.1", "localhost", "[::1]")


class Gate:
    """ASGI middleware in front of gradio, which would also run an event past the queue, fetch a picture from an address
    that a visitor names, read a request of any length, keep any number of files in ``folder``, and answer another
    page that is open in the same browser. ``hosts`` are the names under which the page may be asked for; if empty, any.
    ``frame`` is the site that may show the page inside one of its own, if there is one.
    """

    def __init__(self, app: ASGIApp, *, hosts: tuple[str, ...], folder: Path, frame: str | None = None) -> None:
        self.app, self.hosts, self.folder, self.frame = app, hosts, folder, frame

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # the page has none
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] != "http":
            await self.app(scope, receive, send)
        else:
            answer = _Answer(scope, send, self.frame)
            try:
                await self.app(scope, await self._checked(Request(scope, receive), receive), answer)
            except HTTPException as refused:
                await answer.refuse(refused)
            except Exception:  # all that gradio raises here is about the request: events run in its queue
                await answer.refuse(HTTPException(400, UNREADABLE))

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


class _Answer:
    """The answer to one request, of which what follows a refusal is not sent. The headers wait for the first words."""

    def __init__(self, scope: Scope, send: Send, frame: str | None) -> None:
        self.scope, self.send, self.frame = scope, send, frame
        self.start: Message | None = None
        self.has_begun = self.has_ended = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start = message
        elif not self.has_begun and NO_SESSION in message.get("body", b""):
            await self.refuse(HTTPException(404, "the session is unknown or over: reload the page."))
        elif not self.has_begun and self.start and self.start["status"] == 422:
            await self.refuse(HTTPException(400, UNREADABLE))  # in place of a list that repeats what was sent
        elif not self.has_ended and self.start:
            if not self.has_begun:
                self.has_begun = True
                is_page = self.scope["path"] == "/"  # and no file of a visitor
                MutableHeaders(scope=self.start).update(_headers(message["body"] if is_page else b"", self.frame))
                await self.send(self.start)
            self.has_ended = not message.get("more_body", False)
            await self.send(message)

    async def refuse(self, refused: HTTPException) -> None:
        """Answer with the reason, or end the answer if it has begun."""
        if not self.has_begun:
            answer = JSONResponse({"detail": refused.detail}, refused.status_code)
            await answer(self.scope, _nothing, self)
        elif not self.has_ended:
            await self({"type": "http.response.body"})


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


def _headers(page: bytes, frame: str | None) -> dict[str, str]:
    """What a browser must not do with an answer, of which ``page`` are the scripts that may run."""
    scripts = " ".join(f"'sha256-{b64encode(sha256(text).digest()).decode()}'" for text in INLINE.findall(page))
    headers = {
        "content-security-policy": POLICY.format(scripts, frame or "'none'"),
        "x-content-type-options": "nosniff",
        "referrer-policy": "same-origin",
    }
    return headers if frame else headers | {"x-frame-options": "DENY"}


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
        raise HTTPException(400, UNREADABLE)


def is_full(folder: Path) -> bool:
    """Whether files of visitors have taken their share of the disk."""
    total = 0
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):  # gradio has just deleted it
            total += max(BLOCK, file.stat().st_size)
    return total > MOST_BYTES
