"""The tab *Forward*."""

import gradio as gr

from nidiff.app.look import Page


def forward_tab(page: Page) -> None:
    gr.Markdown("Soon.")
