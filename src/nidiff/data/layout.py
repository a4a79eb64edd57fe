"""What the axes of an array are, by letters: NCHW is items, channels, height and width."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nidiff.data.grid import AXES
from nidiff.errors import InputError, shown

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_COLOURS = 4  # an array N×H×W×C without a layout has so many channels, or fewer
EXAMPLES = {2: "NL", 3: "NCL", 4: "NCHW", 5: "NCDHW"}


@dataclass(frozen=True)
class Layout:
    """Letters in the order of the file: N for the items, C for the channels if there are any, and those of `AXES`."""

    letters: str

    def __post_init__(self) -> None:
        letters = self.letters
        known = isinstance(letters, str) and all(letter in ("N", "C", *AXES) for letter in letters)
        event = self.event if known else ""
        if not known or "N" not in letters or not 1 <= len(event) <= 3 or len({*letters}) < len(letters):
            wanted = f"N for the items, C for the channels if there are any, and one to three of {', '.join(AXES)}"
            raise InputError(f"layout={shown(letters)} is not a layout: give {wanted}, such as NCHW.")

    @property
    def event(self) -> str:
        """The letters of an item without its channels."""
        return self.letters.replace("N", "").replace("C", "")

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(AXES[letter] for letter in self.event)

    def order(self, argument: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The axes of an array of ``shape`` as N, C if it has channels, *event."""
        if len(shape) != len(self.letters):
            example = f", such as {EXAMPLES[len(shape)]}" if len(shape) in EXAMPLES else ""
            raise InputError(
                f"layout={self.letters!r} has {len(self.letters)} letters, but {argument} has shape {tuple(shape)}: "
                f"give one letter per axis{example}."
            )
        wanted = "N" + "C" * ("C" in self.letters) + self.event
        return tuple(self.letters.index(letter) for letter in wanted)

    def arrange(self, argument: str, array: "NDArray[Any]") -> "NDArray[Any]":
        """The array as [N, C, *event], without copying it."""
        array = array.transpose(self.order(argument, array.shape))
        return array if "C" in self.letters else array[:, None]


def as_layout(text: str | None, argument: str, shape: Sequence[int]) -> Layout:
    """The layout ``text`` of an array; without one NL, NHW, or NHWC if the last axis has at most 4 entries."""
    if text is not None:
        return Layout(text)
    if len(shape) == 2 or len(shape) == 3:
        return Layout("NL" if len(shape) == 2 else "NHW")
    if len(shape) == 4 and shape[-1] <= MOST_COLOURS:
        return Layout("NHWC")
    if len(shape) not in EXAMPLES:
        raise InputError(f"{argument} has shape {tuple(shape)}: give items with one to three axes and channels.")
    example = "NTHWC" if len(shape) == 5 and shape[-1] <= MOST_COLOURS else EXAMPLES[len(shape)]
    raise InputError(
        f"{argument} has shape {tuple(shape)}, which does not say what its axes are: give layout={example} or the like."
    )
