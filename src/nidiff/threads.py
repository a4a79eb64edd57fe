"""How torch's threads wait for each other, which decides how fast it is beside other work."""

import os


def wait_briefly() -> None:
    """Let idle OpenMP threads sleep after about 10 µs instead of spinning. Has an effect only before torch is imported.

    GNU's runtime, which torch brings on Linux, spins for milliseconds at every barrier: beside one other busy process a
    step on two threads then takes 30 times as long, because each waits for a thread that has lost its core. A count of
    10,000 is long enough to lose nothing on a quiet machine (benchmarks/threads.py). The user's own setting wins.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
