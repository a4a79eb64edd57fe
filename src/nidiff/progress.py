"""How long-running work reports its progress, and the bar that shows it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[float, int], object]
"""Called now and then with the amount done and the total."""


@contextmanager
def progress_bar(title: str, unit: str, shown: bool = True) -> Iterator[Callable[[float, int], None]]:
    """Show the amount done, the rate and the time left on stderr, if that is a terminal."""
    from tqdm import tqdm

    with tqdm(unit=f" {unit}", unit_scale=True, desc=title, leave=False, disable=None if shown else True) as bar:

        def progress(done: float, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress
