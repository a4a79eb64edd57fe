"""Requests that no browser would make: each is refused in a sentence, and the terminal of the page stays empty."""

import json
import math
import random
import socket
from itertools import product
from urllib.parse import urlsplit

import pytest
from conftest import CASES
from visitor import Visitor, served

ODD = [None, True, -1, 10**9, 2**63, 10**30, 1.5, math.nan, math.inf]
ODD += ["", "x", "\udcff", "0\x00", [], {}, [[]], {"a": 1}]
FIELDS = ["fn_index", "session_hash", "data", "event_id", "trigger_id", "event_data", "batched", "other"]
BYTES = [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 4000, b'{"session_hash": "a"}', b'{"session_hash": "\\ud800"}']
KINDS = ["application/json", "application/json; charset=utf-7", "text/plain"]
KINDS += ["multipart/form-data", "multipart/form-data; boundary=a"]
HEADS = [b'name="other"', b"\xff; name=\xff", b'name="files"; filename="../../x\x00"']
HEADS += [b'name="files"; filename="%s"' % (b"y" * 5000)]
PARTS = [b"", b"--a\r\n\r\n"]
PARTS += [b"--a\r\nContent-Disposition: form-data; %s\r\n\r\nx\r\n--a--\r\n" % head for head in HEADS]
PLACES = ["/assets/", "/static/", "/theme.css/", "/queue/join/", "/ws/"]
PLACES += [f"/gradio_api/{action}" for action in ("file=", "call/", "run/")]
PLACES += ["/gradio_api/queue/data?session_hash=", "/gradio_api/upload_progress?upload_id="]
NAMES = ["nobody", "%00", "%ff", "x" * 5000, "..%2f..", "a<gradio-sep>b", "\u2603"]


@pytest.fixture(scope="module")
def visitor(tmp_path_factory):
    with served(tmp_path_factory.mktemp("place")) as url, Visitor(url) as visitor:
        yield visitor


def is_refused(answer) -> bool:
    return 400 <= answer.status_code < 500 and "\n" not in answer.text.strip()


def test_events_that_are_none_of_the_page(visitor, tally):
    """Each is refused when it is sent, or gets a sentence for an answer if its envelope is right."""
    draw, failed = random.Random(0), 0
    known = {event["id"] for event in visitor.config["dependencies"]}
    for _ in range(60 * CASES):
        body = {"data": [], "fn_index": draw.choice(visitor.events)["id"], "session_hash": visitor.session}
        body |= {draw.choice(FIELDS): draw.choice(ODD) for _ in range(draw.randrange(1, 4))}
        action = draw.choice(["queue/join", "queue/join", "cancel", "reset"])
        content, kind = json.dumps(body), "application/json"
        if draw.random() < 0.2:
            content, kind = draw.choice(BYTES), draw.choice(KINDS)
        answer = visitor.http.post(f"/gradio_api/{action}", content=content, headers={"content-type": kind})
        is_event = action != "queue/join" or (isinstance(body["fn_index"], int) and body["fn_index"] in known)
        failed += not (is_refused(answer) or (is_event and answer.status_code == 200))
    tally("page: events", 60 * CASES, failed)
    assert failed == 0
    event = visitor.event("noise-gff-gamma", "change")
    assert visitor.ask(event, visitor.usual(event)).done  # the control, after all of them


def test_places_uploads_and_headers_that_are_none_of_the_page(visitor, tally):
    draw, tried, failed = random.Random(1), 0, 0
    for place, name in product(PLACES, NAMES):
        tried, failed = tried + 1, failed + (not is_refused(visitor.http.get(f"{place}{name}")))
    for _ in range(20 * CASES):
        kind = draw.choice(
            [*KINDS, f"multipart/form-data; boundary={'a' * 5000}", "multipart/form-data; boundary=\xff"]
        )
        place = f"/gradio_api/upload{draw.choice(['', '?upload_id=x'])}"
        answer = visitor.http.post(place, content=draw.choice(PARTS), headers={b"content-type": kind.encode("latin1")})
        tried, failed = tried + 1, failed + (not (answer.status_code == 200 or is_refused(answer)))
    tally("page: places and uploads", tried, failed)
    assert failed == 0


def test_what_is_no_http(visitor, tally):
    address, failed = urlsplit(str(visitor.http.base_url)), 0
    head = f"HTTP/1.1\r\nHost: {address.netloc}\r\n".encode()
    upgrade = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    upgrade += b"Sec-WebSocket-Key: MDEyMzQ1Njc4OTAxMjM0NQ==\r\n"
    requests = [
        b"\x16\x03\x01\x00\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /%zz%00 " + head + b"\r\n",
        b"GET /" + b"x" * 100_000 + b" " + head + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: \xff\r\n\r\n",
        *(
            b"POST /gradio_api/queue/join " + head + b"Content-Length: %s\r\n\r\n" % length
            for length in (b"x", b"-5", b"1e3")
        ),
        *(b"GET " + place + b" " + head + upgrade + b"\r\n" for place in (b"/queue/join", b"/gradio_api/queue/join")),
    ]
    for request in requests:
        with socket.create_connection((address.hostname, address.port), timeout=30) as line:
            line.sendall(request)
            failed += not line.recv(12).startswith(b"HTTP/1.1 4")
    tally("page: what is no HTTP", len(requests), failed)
    assert failed == 0
