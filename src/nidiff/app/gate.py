"""The gate in front of gradio: it lets in the requests that the page itself makes, of bounded size."""

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

LONGEST = {"queue/join": 2**16, "component_server": 5 * 2**20}  # bytes of a request; the second sends what is painted
USUAL = 2**12  # bytes of any other
LARGEST_FILE = 16 * 2**20  # bytes of a file that is sent
AROUND = 2**16  # bytes at most around the file in its request
PATIENCE = 30.0  # seconds for a request to arrive
LIFETIME = 3600  # seconds after which a visitor's file is deleted
MOST_BYTES, BLOCK = 2**30, 2**14  # of all files that visitors have sent or drawn; what a file counts at least
POSTED = ("queue/join", "upload", "component_server", "cancel", "reset")  # all that the page posts
FETCHED = re.compile(  # all that it gets; a file by its path, not by an address that would be fetched
    r"/(config|theme\.css|favicon\.ico|robots\.txt|manifest\.json|(assets|static)/.*"
    r"|gradio_api/(queue/data|heartbeat/[A-Za-z0-9]{1,64}|startup-events|upload_progress|file=(?!\w+://).*))?"
)
SESSION = re.compile(r"[A-Za-z0-9]{1,64}")
FORM_SESSION = re.compile(rb'name="session_hash"\r\n\r\n[A-Za-z0-9]{1,64}\r\n')
LOCAL = ("127.0.0.1", "localhost", "[::1]")

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Refused(Exception):
    """A request that is not let in: the status and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        self.status, self.sentence = status, sentence


class Gate:
    """ASGI middleware in front of gradio, which would also run an event past the queue, fetch a picture from an address
    that a visitor names, read a request of any length, keep any number of files in ``folder``, and answer another
    page that is open in the same browser. ``hosts`` are the names under which the page may be asked for; if empty, any.
    """

    def __init__(self, app: Any, *, hosts: tuple[str, ...], folder: Path) -> None:
        self.app, self.hosts, self.folder = app, hosts, folder

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                receive = await self._checked(scope, receive)
            except Refused as refused:
                body = json.dumps({"detail": refused.sentence}).encode()
                headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
                await send({"type": "http.response.start", "status": refused.status, "headers": headers})
                await send({"type": "http.response.body", "body": body})
                return
        await self.app(scope, receive, send)

    async def _checked(self, scope: Message, receive: Receive) -> Receive:
        """How gradio may read the request, if it is let in."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, length = headers.get(b"host", ""), headers.get(b"content-length", "")
        path, is_get = scope["path"], scope["method"] in ("GET", "HEAD")
        action = path.removeprefix("/gradio_api/").strip("/")
        origin = headers.get(b"origin", f"http://{host}").partition("://")[2]
        if self.hosts and (re.sub(r":\d+$", "", host) not in self.hosts or origin != host):
            raise Refused(403, "only this page itself is answered, on the computer it runs on: open http://127.0.0.1.")
        if not (FETCHED.fullmatch(path) if is_get else action in POSTED):
            raise Refused(403, "only what the page itself asks for is answered.")
        if is_get:
            return receive
        if action == "upload":
            if not length.isdecimal() or int(length) > LARGEST_FILE + AROUND:
                raise Refused(413, f"a file may have at most {LARGEST_FILE >> 20} MB: choose a smaller one.")
            if await asyncio.to_thread(is_full, self.folder):
                raise Refused(507, "visitors have sent as many files as fit here: try again in an hour.")
            return receive
        body = await _read(receive, LONGEST.get(action, USUAL))
        _check_body(action, body)
        whole = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def again() -> Message:
            return next(whole, None) or await receive()

        return again


async def _read(receive: Receive, longest: int) -> bytes:
    """All of a request, if it is not too long and arrives in time."""
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(PATIENCE):
            while more and len(body) <= longest:
                message = await receive()
                body += message.get("body", b"")
                more = message.get("more_body", False)
    except TimeoutError:
        raise Refused(408, "the request did not arrive in time: send it again.") from None
    if not body or len(body) > longest:
        raise Refused(413, f"such a request has at most {longest >> 10} KB: send less.")
    return bytes(body)


def _check_body(action: str, body: bytes) -> None:
    """Refuse what no browser would send, and an address that would be fetched."""
    if action == "component_server":
        has_session, has_address = FORM_SESSION.search(body) is not None, False
    else:
        try:
            sent = json.loads(body)
            has_session, has_address = action == "reset" or _has_session(sent), _has_address(sent)
        except (ValueError, RecursionError):
            has_session = has_address = False
    if not has_session:
        raise Refused(400, "the request cannot be read or names no session: reload the page.")
    if has_address:
        raise Refused(403, "a file must be sent itself, not its address: choose one on your computer.")


def _has_session(sent: Any) -> bool:
    session = sent.get("session_hash") if isinstance(sent, dict) else None
    return isinstance(session, str) and SESSION.fullmatch(session) is not None


def _has_address(value: Any) -> bool:
    """Whether a request names a file by its address on a network."""
    if isinstance(value, dict):
        path = value.get("path")
        return (isinstance(path, str) and "://" in path) or any(map(_has_address, value.values()))
    return isinstance(value, list) and any(map(_has_address, value))


def is_full(folder: Path) -> bool:
    """Whether files of visitors have taken their share of the disk; old ones are deleted."""
    total = 0
    for file in folder.rglob("*"):
        try:
            about = file.stat()
            if not file.is_dir() and time.time() - about.st_mtime > LIFETIME:
                file.unlink()
                continue
        except FileNotFoundError:  # gradio has just deleted it
            continue
        total += max(BLOCK, about.st_size)
    return total > MOST_BYTES
