"""The page, served as a user would, and a visitor without a browser, who can send whatever they like."""

import json
import os
import re
import struct
import subprocess
import sys
import time
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

APP = Path(__file__).parents[1] / "space" / "app.py"
PATIENCE = 180.0  # seconds for an answer


@contextmanager
def served(place: Path, *models: Path, **settings: str) -> Iterator[str]:
    """The address of the page, whose terminal is the file ``place / "log"``. In the end no traceback is in it."""
    log = place / "log"
    settings |= {"GRADIO_SERVER_NAME": "127.0.0.1", "GRADIO_SERVER_PORT": "0", "TMPDIR": str(place)}
    with (
        log.open("w") as terminal,
        subprocess.Popen(
            [sys.executable, APP, *models], stderr=terminal, cwd=place, env=os.environ | settings
        ) as process,
    ):
        try:
            for _ in range(1200):
                address = re.search(r"http://127\.0\.0\.1:\d+(?=/)", log.read_text())
                if address or process.poll() is not None:
                    break
                time.sleep(0.1)
            assert address, log.read_text()
            yield address[0]
        finally:
            process.terminate()
    lines = log.read_text().splitlines()
    assert len(lines) == 2, f"more than the address and the end are in the terminal: {lines}"


class Answer(NamedTuple):
    done: bool
    values: list[Any]
    """What the page is to show; of an event that showed something on the way, the last of it."""
    error: str
    seconds: float


class Visitor:
    """One browser tab, as the server sees it."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=PATIENCE)
        self.session = uuid.uuid4().hex
        self.config = self.http.get("/config").json()
        self.components = {part["id"]: part for part in self.config["components"]}
        self.events = [event for event in self.config["dependencies"] if event["backend_fn"]]

    def __enter__(self) -> "Visitor":
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def names(self, event: dict[str, Any]) -> list[str]:
        """The elem_id of each input of an event."""
        return [str(self.components[part]["props"].get("elem_id")) for part in event["inputs"]]

    def event(self, target: str, trigger: str) -> dict[str, Any]:
        """The event of the component with that elem_id."""
        ids = [key for key, one in self.components.items() if one["props"].get("elem_id") == target]
        found = [event for event in self.events if [ids[0], trigger] in [list(one) for one in event["targets"]]]
        assert len(found) == 1, f"{len(found)} events of {target} for {trigger}"
        return found[0]

    def usual(self, event: dict[str, Any]) -> list[Any]:
        """What the page sends if nothing was touched."""
        return [self.components[part]["props"].get("value") for part in event["inputs"]]

    def ask(self, event: dict[str, Any], values: list[Any]) -> Answer:
        """Send ``values`` and wait for the answer."""
        begun = time.monotonic()
        joined = self.join(event, values)
        if joined.status_code != 200:
            return Answer(False, [], joined.text, time.monotonic() - begun)
        shown: list[Any] = []
        with self.http.stream("GET", "/gradio_api/queue/data", params={"session_hash": self.session}) as stream:
            for line in stream.iter_lines():
                message = json.loads(line.removeprefix("data:")) if line.startswith("data:") else {}
                if message.get("event_id") not in (None, joined.json()["event_id"]):
                    continue
                output = message.get("output") or {}
                if message.get("msg") in ("process_generating", "process_completed") and output.get("data"):
                    shown = output["data"]
                if message.get("msg") == "process_completed":
                    said = str(shown[:1])  # of its tab
                    error = str(output.get("error") or (said if 'role="alert"' in said else ""))
                    return Answer(message["success"] and not error, shown, error, time.monotonic() - begun)
                if message.get("msg") == "unexpected_error":
                    break
        return Answer(False, [], "the server gave up", time.monotonic() - begun)

    def leave(self, event: dict[str, Any], values: list[Any]) -> None:
        """Send ``values``, see the work begin, and close the page."""
        self.join(event, values)
        with self.http.stream("GET", "/gradio_api/queue/data", params={"session_hash": self.session}) as stream:
            next(line for line in stream.iter_lines() if "process_generating" in line)

    def join(self, event: dict[str, Any], values: list[Any]) -> httpx.Response:
        """Send ``values``, and do not wait."""
        body = {"data": values, "fn_index": event["id"], "session_hash": self.session, "trigger_id": None}
        headers = {"content-type": "application/json"}  # with NaN, which httpx would refuse to write
        return self.http.post("/gradio_api/queue/join", content=json.dumps(body), headers=headers)


def claimed_png(width: int, height: int) -> bytes:
    """The head of a PNG that claims a size, and nothing after it."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head)) + bytes(64)
