"""What the axes of an array are, by letters: NCHW is items, channels, height and width."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nidiff.data.grid import AXES
from nidiff.errors import InputError

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
        is_known = {"N"} <= {*letters} <= {"N", "C", *AXES}
        if not is_known or not 1 <= len(self.event) <= 3 or len({*letters}) < len(letters):
            remedy = f"give N for the items, C for the channels if there are any, and one to three of {', '.join(AXES)}"
            raise InputError("layout", letters, "is not a layout", f"{remedy}, such as NCHW")

    @property
    def event(self) -> str:
        """The letters of an item without its channels."""
        return self.letters.replace("N", "").replace("C", "")

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(AXES[letter] for letter in self.event)

    def order(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The axes of the array ``name`` of ``shape`` as N, C if it has channels, *event."""
        if len(shape) != len(self.letters):
            example = f", such as {EXAMPLES[len(shape)]}" if len(shape) in EXAMPLES else ""
            problem = f"has {len(self.letters)} letters, but {name!r} has shape {tuple(shape)}"
            raise InputError("layout", self.letters, problem, f"give one letter per axis{example}")
        wanted = "N" + "C" * ("C" in self.letters) + self.event
        return tuple(self.letters.index(letter) for letter in wanted)

    def arrange(self, name: str, array: "NDArray[Any]") -> "NDArray[Any]":
        """The array as [N, C, *event], without copying it."""
        array = array.transpose(self.order(name, array.shape))
        return array if "C" in self.letters else array[:, None]


def as_layout(text: str | None, name: str, shape: Sequence[int]) -> Layout:
    """The layout ``text`` of the array ``name``; by default NL, NHW, or NHWC with at most 4 channels."""
    if text is not None:
        return Layout(text)
    if len(shape) == 2 or len(shape) == 3:
        return Layout("NL" if len(shape) == 2 else "NHW")
    if len(shape) == 4 and shape[-1] <= MOST_COLOURS:
        return Layout("NHWC")
    is_video = len(shape) == 5 and shape[-1] <= MOST_COLOURS
    example = "NTHWC" if is_video else EXAMPLES.get(len(shape), "NCHW, for items with one to three axes,")
    problem = f"has shape {tuple(shape)}, which does not say what its axes are"
    raise InputError("data", name, problem, f"give `layout` {example} or the like")
