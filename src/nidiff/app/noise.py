"""The tab *Noise*."""

import gradio as gr

from nidiff.app.look import Page


def noise_tab(page: Page) -> None:
    gr.Markdown("Soon.")
