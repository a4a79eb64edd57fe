"""The page of ``nidiff explore``: six tabs."""

from typing import Any

import gradio as gr

from nidiff.app.compare import compare_tab
from nidiff.app.forward import forward_tab
from nidiff.app.layout import QUICK, Tab
from nidiff.app.noise import noise_tab
from nidiff.app.restore import restore_tab
from nidiff.app.runs import runs_tab
from nidiff.app.sample import sample_tab
from nidiff.app.shelf import Shelf

TABS = {
    "Forward": forward_tab,  # which has a field of turbulence, and is seen first
    "Noise": noise_tab,
    "Sample": sample_tab,
    "Compare": compare_tab,
    "Restore": restore_tab,
    "Runs": runs_tab,
}
HEAD = '<p class="head"><b>nidiff</b> Noise with a covariance: look at it, add it, take it away again.</p>'
IS_DARK = "() => document.body.classList.contains('dark')"
CLEANED = (600, 3600)  # seconds: how often files of visitors are looked through, and how old they may be


class QuietBlocks(gr.Blocks):
    """Blocks that refuse what no menu offers in a sentence, and not in the terminal too."""

    async def preprocess_data(self, *values: Any, **options: Any) -> list[Any]:
        try:
            return await super().preprocess_data(*values, **options)
        except Exception:  # each component raises errors of its own
            raise gr.Error("this is not what the page offers: reload it.", print_exception=False) from None


def build(shelf: Shelf) -> gr.Blocks:
    """The page about what is on the shelf; it is not served yet."""
    with QuietBlocks(title="nidiff explore", analytics_enabled=False, delete_cache=CLEANED) as blocks:
        gr.HTML(HEAD, padding=False)
        dark = gr.Checkbox(visible="hidden")
        ready = blocks.load(None, None, dark, js=IS_DARK, **QUICK)
        for name, tab in TABS.items():
            with gr.Tab(name, id=name.lower()):
                tab(Tab(name.lower(), shelf, dark, ready))
    return blocks
