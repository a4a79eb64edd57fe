"""The program ``nidiff``, also as ``python -m nidiff``: from its first import on, an interrupt ends it in one line."""

import contextlib
import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130  # the exit code that a shell gives


def main() -> int:
    """Run the command line. SIGTERM is an interrupt too, so that what is written is left in order."""
    signals = signal.SIGINT, signal.SIGTERM
    try:
        for number in signals:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup wants it
                signal.signal(number, _interrupt)
        from nidiff.cli import main as run

        return run()
    except KeyboardInterrupt:
        return _say_interrupted()
    finally:
        for number in signals:  # all is written; while Python ends, a signal would only change the exit code
            signal.signal(number, signal.SIG_IGN)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise `KeyboardInterrupt`; inside an import, which libraries do not expect to fail, end the process at once."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(_say_interrupted())
        frame = frame.f_back
    raise KeyboardInterrupt


def _say_interrupted() -> int:
    with contextlib.suppress(OSError):  # stderr is closed
        os.write(2, b"nidiff: interrupted\n")
    return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
