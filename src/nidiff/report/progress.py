"""A bar for functions that report (done, total)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(title: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Done, rate and time left on stderr, where that is a terminal."""
    from tqdm import tqdm

    with tqdm(unit=f" {unit}", unit_scale=True, desc=title, leave=False, disable=None) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress
