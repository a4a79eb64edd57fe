"""Draw the pictures of models that ship anew, when the bits of a seed have changed: python scripts/redraw_cards.py.

All of them, or those named as arguments. Seeds, sampler and steps are those of their cards, and weights stay as they
are; samples.png, zoo.json and model/README.md are written.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from packing import redraw

from nidiff.model.zoo import find_model, zoo_models

if __name__ == "__main__":
    for entry in [find_model(name) for name in sys.argv[1:]] or zoo_models().values():
        print(entry, len(redraw(entry).picture.seeds), "samples", flush=True)
