"""The tab *Runs*."""

import gradio as gr

from nidiff.app.look import Page


def runs_tab(page: Page) -> None:
    gr.Markdown("Soon.")
