"""What is let in: the requests that the page itself makes, from this computer, of bounded size."""

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
KEPT = 3600  # seconds for which a file is kept
MOST_BYTES, BLOCK = 2**30, 2**14  # of all files that visitors have sent or drawn; what a file counts at least
SENDS = ("queue/join", "upload", "component_server", "cancel", "reset")  # all that the page posts
OPENS = re.compile(  # all that it gets; a file by its path, not by an address that would be fetched
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
    """In front of gradio, which would also run an event past the queue, fetch a picture from an address that a visitor
    names, read a request of any length, keep any number of files in ``folder``, and answer a stranger's page that is
    open in the same browser. ``hosts`` are the names under which the page may be asked for; none: under any."""

    def __init__(self, app: Any, *, hosts: tuple[str, ...], folder: Path) -> None:
        self.app, self.hosts, self.folder = app, hosts, folder

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                receive = await self._checked(scope, receive)
            except Refused as refused:
                await _refuse(send, refused)
                return
        await self.app(scope, receive, send)

    async def _checked(self, scope: Message, receive: Receive) -> Receive:
        """How to read a request that is let in."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "")
        if self.hosts and re.sub(r":\d+$", "", host) not in self.hosts:
            raise Refused(403, "this page is for the computer it runs on: open it as http://127.0.0.1.")
        if scope["method"] in ("GET", "HEAD"):
            if not OPENS.fullmatch(scope["path"]):
                raise Refused(403, "only what the page itself asks for is answered.")
            return receive
        place = scope["path"].removeprefix("/gradio_api/").strip("/")
        if place not in SENDS:
            raise Refused(403, "only what the page itself sends is taken.")
        if self.hosts and headers.get(b"origin", f"http://{host}").partition("://")[2] != host:
            raise Refused(403, "another page has sent this: open nidiff explore itself.")
        length = headers.get(b"content-length", "")
        if place == "upload":
            if not length.isdecimal() or int(length) > LARGEST_FILE + AROUND:
                raise Refused(413, f"a file may have at most {LARGEST_FILE >> 20} MB: choose a smaller one.")
            if await asyncio.to_thread(is_full, self.folder):
                raise Refused(507, "visitors have sent as many files as fit here: try again in an hour.")
            return receive
        body = await _read(receive, LONGEST.get(place, USUAL), length)
        _check_body(place, body)
        whole = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def again() -> Message:
            return next(whole, None) or await receive()

        return again


async def _read(receive: Receive, longest: int, length: str) -> bytes:
    """All of a request, if it is not too long and comes soon."""
    body, more = bytearray(), not (length.isdecimal() and int(length) > longest)
    try:
        async with asyncio.timeout(PATIENCE):
            while more and len(body) <= longest:
                message = await receive()
                body += message.get("body", b"")
                more = message.get("more_body", False)
    except TimeoutError:
        raise Refused(408, "the request did not arrive in time: send it again.") from None
    if more or not body or len(body) > longest:
        raise Refused(413, f"such a request has at most {longest >> 10} KB: send less.")
    return bytes(body)


def _check_body(place: str, body: bytes) -> None:
    """Refuse what no browser would send, and an address that would be fetched."""
    if place == "component_server":
        has_session, fetches = FORM_SESSION.search(body) is not None, False
    else:
        try:
            sent = json.loads(body)
            has_session, fetches = place == "reset" or _has_session(sent), _has_address(sent)
        except (ValueError, RecursionError):
            raise Refused(400, "the request cannot be read: reload the page.") from None
    if not has_session:
        raise Refused(400, "the request names no session: reload the page.")
    if fetches:
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
            if not file.is_dir() and time.time() - about.st_mtime > KEPT:
                file.unlink()
                continue
        except FileNotFoundError:  # gradio has just deleted it
            continue
        total += max(BLOCK, about.st_size)
    return total > MOST_BYTES


async def _refuse(send: Send, refused: Refused) -> None:
    body = json.dumps({"detail": refused.sentence}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
