"""The page of `nidiff explore` as a Space: the models that ship, and any folders that it is given as arguments."""

import os
import sys

from nidiff.cli import main

HOST = os.environ.get("GRADIO_SERVER_NAME", "0.0.0.0")  # a Space is reached from outside of its container
PORT = os.environ.get("GRADIO_SERVER_PORT", "7860")

if __name__ == "__main__":
    sys.exit(main(["explore", *sys.argv[1:], "--host", HOST, "--port", PORT]))
