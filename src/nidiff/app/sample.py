"""The tab *Sample*."""

import gradio as gr

from nidiff.app.look import Page


def sample_tab(page: Page) -> None:
    gr.Markdown("Soon.")
