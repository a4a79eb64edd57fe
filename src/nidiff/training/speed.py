"""How long a training step will take, measured in seconds rather than in whole steps."""

import dataclasses
import time

from nidiff.training.build import Trainer
from nidiff.training.loop import anyone, step_batches, train_step

LONG_ENOUGH = 1.0  # seconds


def seconds_per_step(trainer: Trainer) -> float:
    """The time of one optimiser step, extrapolated from batches of 1, 2, 4, … images up to a step that takes a second.

    A step costs a + b · images: a (optimiser, moving average, overhead) shows in the smallest batch, b in the largest.
    The weights of ``trainer`` change.
    """
    experiment, processes = trainer.experiment, trainer.accelerator.num_processes
    most = experiment.batch_size // processes
    _measure(trainer, 1)  # the first step allocates and compiles
    size, first = 1, _measure(trainer, 1)
    last = first
    while size < most and (size == 1 or not anyone(trainer.accelerator, last >= LONG_ENOUGH)):
        size = min(2 * size, most)
        last = _measure(trainer, size)
    trainer.experiment = experiment
    return last + (most - size) * max(last - first, 0.0) / max(size - 1, 1)


def _measure(trainer: Trainer, images: int) -> float:
    """Seconds of a step on ``images`` images per process."""
    batch = images * trainer.accelerator.num_processes
    trainer.experiment = dataclasses.replace(
        trainer.experiment, steps=trainer.step + 1, batch_size=batch, accumulation=1, cooldown=0
    )
    batches = iter(list(step_batches(trainer)))
    start = time.perf_counter()
    train_step(trainer, batches).item()  # waits for the device
    return time.perf_counter() - start
