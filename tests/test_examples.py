"""The examples run."""

import importlib.util
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_smld_digits(tmp_path):
    named = load("smld_digits").main(tmp_path, steps=4, count=8)
    assert named.keys() == {"cas", "als"}
    assert (tmp_path / "smld_digits.png").exists()
