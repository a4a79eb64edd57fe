"""The tab *Restore*."""

import gradio as gr

from nidiff.app.look import Page


def restore_tab(page: Page) -> None:
    gr.Markdown("Soon.")
