"""``nidiff explore``: look at noise, models and runs in the browser."""

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from nidiff.commands.flags import CheckpointFlag, QuietFlag
from nidiff.extras import require

USUAL = Path("runs")


@dataclass(frozen=True)
class Explore:
    """Serve a page on this computer: noise, the forward process, samples, comparisons, restoration and runs."""

    models: Annotated[
        Positional[tuple[Path, ...]],
        arg(metavar="MODEL_OR_RUN", help_behavior_hint="(default: runs/, if it is there)"),
    ] = ()
    """Run directories, model folders, or folders that contain some. The models that ship are always there. Nothing
    else is read."""
    checkpoint: CheckpointFlag = None
    port: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: 7860, or the next free one)")] = None
    """The port to serve on; 0 picks any free one."""
    host: str = "127.0.0.1"
    """The address to listen on. With 0.0.0.0, other computers can use the page too."""
    open: bool = False
    """Open the page in the browser."""
    quiet: QuietFlag = False

    def run(self) -> None:
        if find_spec("gradio") is None:  # it is imported later, when it has been told where its files go
            require("gradio")
        from nidiff.app.server import serve
        from nidiff.app.shelf import Shelf

        shelf = Shelf(self.models, folder=None if self.models else USUAL, checkpoint=self.checkpoint)
        serve(shelf, self.host, self.port, self._announce)

    def _announce(self, url: str) -> None:
        print(f"{url}   (press Ctrl-C to stop)", file=sys.stderr, flush=True)
        if self.open:
            import webbrowser

            webbrowser.open(url)
