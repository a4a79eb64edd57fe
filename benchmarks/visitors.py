"""Twenty visitors of `nidiff explore` at once, for a minute, on this computer: answers, errors, waiting, memory.

    python benchmarks/visitors.py

Each opens the page, then again and again moves a slider of the noise, the level of the forward process, or compares
four samples of two models of digits, and looks at the answer for a second or so. They talk to 127.0.0.1 only.
"""

import argparse
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from visitor import Visitor

LOOKING = (0.5, 2.0)  # seconds between an answer and the next request
KINDS = {
    "noise": ("noise-gff-gamma", "change", {"noise-gff-gamma": lambda: round(random.uniform(0, 2), 2)}),
    "forward": ("forward-level", "change", {"forward-level": lambda: round(random.random(), 2)}),
    "compare": ("compare-compare", "click", {
        "compare-first-model": lambda: "digits", "compare-second-model": lambda: "digits-ddpm",
        "compare-first-sampler": lambda: "ancestral", "compare-second-sampler": lambda: "ancestral",
        "compare-first-steps": lambda: 12, "compare-second-steps": lambda: 12, "compare-seeds": lambda: "0-3",
    }),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--visitors", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    command = [sys.executable, "-m", "nidiff", "explore", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = re.findall(r"http://127\.0\.0\.1:\d+", server.stderr.readline())[0]
        threading.Thread(target=server.stderr.read, daemon=True).start()
        first, waits, errors = memory(server.pid), {kind: list[float]() for kind in ("page", *KINDS)}, list[str]()
        end, most = time.monotonic() + options.seconds, [first]
        visitors = [
            threading.Thread(target=visit, args=(url, end, waits, errors, seed)) for seed in range(options.visitors)
        ]
        for one in visitors:
            one.start()
        while any(one.is_alive() for one in visitors):
            most.append(memory(server.pid))
            time.sleep(0.5)
        halfway = max(most[: len(most) // 2])
        server.terminate()
        code = server.wait(30)
    print(f"{options.visitors} visitors, {options.seconds:g} s")
    for kind, seconds in waits.items():
        if seconds:
            middle, late = np.quantile(seconds, [0.5, 0.95])
            print(f"{kind:8} {len(seconds):5} answers, wait {middle:.2f} s (median), {late:.2f} s (95 %)")
    print(f"{len(errors)} errors {sorted(set(errors))[:3]}")
    print(f"memory {first:.0f} MB before, {halfway:.0f} MB in the first half, {max(most):.0f} MB at most; exit {code}")
    sys.exit(1 if errors or code else 0)


def visit(url: str, end: float, waits: dict[str, list[float]], errors: list[str], seed: int) -> None:
    """One visitor, until ``end``; what was asked for by then is waited for."""
    choose = random.Random(seed)
    begun = time.monotonic()
    with Visitor(url) as visitor:
        page = visitor.http.get("/")
        waits["page"].append(time.monotonic() - begun)
        if page.status_code != 200:
            errors.append(f"the page: {page.status_code}")
        while time.monotonic() < end:
            kind = choose.choice([*KINDS])
            target, trigger, changed = KINDS[kind]
            event = visitor.event(target, trigger)
            values = [
                changed[name]() if name in changed else value
                for name, value in zip(visitor.names(event), visitor.usual(event), strict=True)
            ]
            answer = visitor.ask(event, values)
            waits[kind].append(answer.seconds)
            if not answer.done:
                errors.append(f"{kind}: {answer.error}")
            time.sleep(choose.uniform(*LOOKING))


def memory(pid: int) -> float:
    """Resident, in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024


if __name__ == "__main__":
    main()
