"""How long-running work reports its progress, and the bar that shows it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int], object]
"""Called now and then with the amount done and the total."""


@contextmanager
def progress_bar(title: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Show the amount done, the rate and the time left on stderr, if that is a terminal."""
    from tqdm import tqdm

    with tqdm(unit=f" {unit}", unit_scale=True, desc=title, leave=False, disable=None) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress
