"""Randomness is drawn in nidiff.randomness and nowhere else."""

import ast
from pathlib import Path

import torch

import nidiff
from nidiff.randomness import mixed_seed, permutation, random_index, uniform

DRAWS = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli"}
DRAWS |= {"multinomial", "poisson", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"}


def draws_in(source: str) -> list[int]:
    """The lines that draw random numbers by torch or numpy."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            text, name = ast.unparse(node.func), node.func.attr
            by_torch = name in DRAWS and (text.startswith("torch.") or name.endswith("_"))
            if text.startswith(("np.random.", "numpy.random.")) or (by_torch and "nn.init." not in text):
                lines.append(node.lineno)
    return lines


def test_random_numbers_are_drawn_in_one_module():
    root = Path(nidiff.__file__).parent
    found = {str(file.relative_to(root)): draws_in(file.read_text()) for file in root.rglob("*.py")}
    assert found.pop("randomness.py")
    assert {file: lines for file, lines in found.items() if lines} == {}


def test_the_check_finds_what_draws():
    source = "torch.randn(3)\nx.normal_()\nnp.random.rand(2)\ntorch.nn.init.normal_(w)\ntorch.random.fork_rng()"
    assert draws_in(source) == [1, 2, 3]


def test_the_draws_of_an_image_depend_on_its_seed_alone():
    for draw in (lambda seeds: random_index(1000, len(seeds), seeds), lambda seeds: uniform(len(seeds), seeds)):
        assert torch.equal(draw([7, 8, 9])[1:], draw([8, 9]))
        assert not torch.equal(draw([7, 8]), draw([8, 7]))
    assert torch.equal(permutation(9, 3), permutation(9, torch.Generator().manual_seed(3)))
    assert len({mixed_seed(1, 2), mixed_seed(2, 1), mixed_seed(12), mixed_seed(1, 2, 0)}) == 4
