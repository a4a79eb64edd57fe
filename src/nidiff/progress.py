"""How long work tells how far it is, and the bar that shows it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int], object]
"""Called now and then with how much is done and how much there is in all."""


@contextmanager
def progress_bar(title: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Done, rate and time left on stderr, where that is a terminal."""
    from tqdm import tqdm

    with tqdm(unit=f" {unit}", unit_scale=True, desc=title, leave=False, disable=None) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress
