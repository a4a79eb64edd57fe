"""The training loop, on accelerate: however many processes train, and wherever a run was resumed, the same weights."""

import contextlib
import dataclasses
import itertools
import math
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from nidiff.data.annotations import conditions_of, examples_of, rows_of
from nidiff.data.dataset import WHOLE, as_stored
from nidiff.data.figures import save_samples_figure
from nidiff.design.kappa import measure_kappa
from nidiff.diffusion.condition import describe_conditions
from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.objective import denoising_loss
from nidiff.errors import InputError, Interrupted
from nidiff.model.folder import save_model
from nidiff.progress import progress_bar
from nidiff.randomness import mixed_seed, random_index, uniform
from nidiff.sampling.sampler import sample
from nidiff.training.baseline import baseline, baseline_text
from nidiff.training.build import Trainer, build_mixture
from nidiff.training.checkpoint import Checkpoint, list_checkpoints, save_checkpoint
from nidiff.training.draws import crop_places, image_generators, image_indices, spread
from nidiff.training.experiment import Experiment
from nidiff.training.run import RunDirectory
from nidiff.training.sharding import is_sharded, part_of, parts_of_optimizer, whole
from nidiff.training.trackers import Tracker

KAPPA_ROWS = 17
LONG_ENOUGH = 1.0  # seconds of a step whose time is measured
# The images of one forward and backward pass, their conditions, and a generator for each.
Batch = tuple[Tensor, dict[str, Tensor], list[torch.Generator]]


def train(trainer: Trainer, run: RunDirectory, trackers: Sequence[Tracker] = ()) -> None:
    """Train from ``trainer.step`` to the end, and save the model in the run directory. ``trackers`` get the numbers of
    the log.

    Raises `Interrupted` after SIGINT or SIGTERM, with a checkpoint of the step it stopped at.
    """
    experiment, accelerator = trainer.experiment, trainer.accelerator
    main = accelerator.is_main_process
    # A log has a line for each checkpoint instead of one for each state of the bar.
    bar = tqdm(total=experiment.steps, initial=trainer.step, unit="step", disable=None if main else True)
    losses: list[Tensor] = []
    since = time.perf_counter()
    batches = step_batches(trainer)
    with bar, _stop_requests() as requested:
        while trainer.step < experiment.steps:
            losses.append(train_step(trainer, batches))
            step = trainer.step
            bar.update()
            last, stop = step == experiment.steps, anyone(accelerator, bool(requested))
            due = last or stop or step % experiment.checkpoint_every == 0
            if due or step % experiment.log_every == 0:
                loss = accelerator.reduce(torch.stack(losses), reduction="mean").mean().item()
                _check_finite(trainer, run, loss)
                rate = len(losses) * experiment.batch_size / (time.perf_counter() - since)
                bar.set_postfix(loss=f"{loss:.4f}", images_per_s=f"{rate:.0f}")
                if bar.disable and due:
                    accelerator.print(f"step {step} of {experiment.steps}: loss {loss:.4f}", file=sys.stderr)
                if main:
                    values = {"loss": loss, "images_per_s": rate, "learning_rate": learning_rate(experiment, step)}
                    run.log(step, **values)
                    for tracker in trackers:
                        tracker.log(values, step=step)
                losses, since = [], time.perf_counter()
            pictures = bool(experiment.sample_every and step % experiment.sample_every == 0)
            if due:
                save(trainer, run)
            if pictures:
                with averaged_weights(trainer) as net:
                    if main:
                        draw(trainer, run, trainer.denoiser.with_net(net))
            if due or pictures:
                accelerator.wait_for_everyone()
            if stop and not last:
                next_ = f"continue {run.folder} with --resume, end it with --resume --finish, or sample it with"
                raise Interrupted(f"stopped after step {step}, with a checkpoint: {next_} --checkpoint latest.")
    with averaged_weights(trainer) as net:
        if main:
            finish(trainer, run, with_kappa(trainer, net))
    accelerator.wait_for_everyone()


def finish(trainer: Trainer, run: RunDirectory, denoiser: Denoiser) -> None:
    """Save the model of a run that has ended, with its last pictures and what the models of its data achieve."""
    of_gaussian = baseline_text(trainer.baseline)
    about = trainer.experiment.about | ({"Gaussian baseline": of_gaussian} if of_gaussian else {})
    if denoiser.conditions:
        about |= {"conditions": describe_conditions(denoiser.conditions, trainer.data.class_names)}
    of_mixture = baseline(denoiser.mixture, trainer.data, trainer.held_out)
    if of_mixture:
        about |= {"mixture baseline": str(baseline_text(of_mixture, "mixture"))}
        run.describe(trainer, mixture=of_mixture)
    if denoiser.kappa is not None or not run.samples_file(trainer.step).exists():
        draw(trainer, run, denoiser)
    save_model(denoiser, run.model, about, grid=trainer.data.grid, run=trainer.identity)


def with_kappa(trainer: Trainer, net: torch.nn.Module) -> Denoiser:
    """The denoiser of a bare network, with the data's mixture, κ and what warm starts lose, where the data's Gaussian
    is known.

    512 images and 17 levels, but no more evaluations of the network than training took. The images are held-out ones,
    or else training items that the mixture is not fitted to; of few data it is fitted to all, and its loss is unknown.
    """
    denoiser, experiment = trainer.denoiser.with_net(net), trainer.experiment
    if denoiser.gaussian is None:
        return denoiser
    data = trainer.held_out
    if data is None or {*conditions_of(data)} != {*denoiser.conditions} or data.num_classes != trainer.data.num_classes:
        data = trainer.data
    rows = spread(len(data), max(1, min(512, experiment.steps * experiment.batch_size // KAPPA_ROWS)))
    apart = data is not trainer.data or 2 * len(rows) <= len(data)
    try:
        mixture = build_mixture(trainer, rows if apart and data is trainer.data else None)
    except InputError as error:  # never at the cost of the model
        trainer.accelerator.print(f"the model knows no mixture of the data: {error}", file=sys.stderr)
        mixture = None
    denoiser = denoiser.with_mixture(mixture)
    with progress_bar("measuring what the network knows of each mode", "levels") as progress:
        conditioned = (denoiser if apart else denoiser.with_mixture(None)).given(**rows_of(data, rows))
        amount = {"num_images": len(rows), "num_rows": KAPPA_ROWS}
        measured = measure_kappa(conditioned, data.batch(rows), **amount, progress=progress)
    return denoiser.with_kappa(measured.kappa)


def train_step(trainer: Trainer, batches: Iterator[Batch]) -> Tensor:
    """Take one optimiser step on this process' share of the batch; returns its mean loss, still on the device."""
    experiment, accelerator = trainer.experiment, trainer.accelerator
    # For dropout, the only draw that belongs to a process and not to an image; the -1 keeps it apart from those.
    torch.manual_seed(mixed_seed(experiment.seed, trainer.step, accelerator.process_index, -1))
    total = torch.zeros((), device=accelerator.device)
    for rest in reversed(range(experiment.accumulation)):
        x0, conditions, generators = next(batches)
        with accelerator.no_sync(trainer.denoiser.net) if rest else contextlib.nullcontext():
            x0 = x0.to(accelerator.device)
            denoiser = trainer.denoiser.given(**conditions)
            how: Any = {"weighting": experiment.weighting, "weights": trainer.weights}
            loss = denoising_loss(denoiser, x0, generator=generators, **how).mean()
            accelerator.backward(loss / experiment.accumulation)
        total += loss.detach() / experiment.accumulation
    accelerator.clip_grad_norm_(trainer.net.parameters(), experiment.gradient_clip)
    for group in trainer.optimizer.param_groups:
        group["lr"] = learning_rate(experiment, trainer.step + 1)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    trainer.ema.step(trainer.net.parameters())
    trainer.step += 1
    return total


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


def learning_rate(experiment: Experiment, step: int) -> float:
    """The rate of step 1, 2, …: straight up over the warm-up, constant, straight down over the cool-down."""
    up, down = step / max(1, experiment.warmup), (experiment.steps - step + 1) / max(1, experiment.cooldown)
    return experiment.learning_rate * min(1.0, up, down)


def draw(trainer: Trainer, run: RunDirectory, denoiser: Denoiser) -> None:
    """Draw the seeds 0, 1, … to samples/STEP.png, of the classes in turn or the conditions of the first items."""
    data, experiment, count = trainer.data, trainer.experiment, trainer.experiment.num_samples
    conditioned, drawing = denoiser.given(**examples_of(data, count)), experiment.sampling(denoiser.process.schedule)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what `sample` warns of was said when the run began
        x = sample(conditioned, (count, *data.shape), generator=range(count), **drawing).cpu()
    if data.grid.dtype in WHOLE:  # which cannot show what went wrong: NaN is black
        x = x.nan_to_num(nan=-1, posinf=1, neginf=-1)
    with run.writing():
        save_samples_figure(as_stored(x, denoiser.scaling, data.grid.dtype), data.grid, run.samples_file(trainer.step))


def save(trainer: Trainer, run: RunDirectory) -> None:
    """Save a checkpoint of everything the next step depends on. Every process must ask for it; one saves."""
    scaler = trainer.accelerator.scaler
    tensors = whole({"model": trainer.net.state_dict(), "ema": _buffers(trainer.net) | _average(trainer)})
    optimizer = whole(trainer.optimizer.state_dict())
    if not trainer.accelerator.is_main_process:
        return
    save_checkpoint(
        run.checkpoints,
        trainer.step,
        tensors=tensors,
        state={"ema_step": trainer.ema.optimization_step, "scaler": scaler and scaler.state_dict()},
        optimizer=optimizer,
        keep=trainer.experiment.keep,
        run=trainer.identity,
    )


def restore(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Put the trainer where it was when the checkpoint was saved."""
    state, stored = trainer.net.state_dict(), checkpoint.tensors["model"]
    known = [name for name in state if name in stored]  # in the same order everywhere
    trainer.net.load_state_dict({**stored, **{name: part_of(stored[name], state[name]) for name in known}})
    for name, average in _average(trainer).items():
        average.copy_(part_of(checkpoint.tensors["ema"][name], average))
    trainer.ema.optimization_step = checkpoint.state["ema_step"]
    trainer.optimizer.load_state_dict(parts_of_optimizer(checkpoint.optimizer or {}, trainer.optimizer))
    if trainer.accelerator.scaler is not None and checkpoint.state["scaler"] is not None:
        trainer.accelerator.scaler.load_state_dict(checkpoint.state["scaler"])
    trainer.step = checkpoint.step


def _average(trainer: Trainer) -> dict[str, Tensor]:
    names = [name for name, _ in trainer.net.named_parameters()]
    return dict(zip(names, trainer.ema.shadow_params, strict=True))


def _buffers(net: torch.nn.Module) -> dict[str, Tensor]:
    """What the state of a network has besides parameters: with their average, it is all that a model needs."""
    parameters = dict(net.named_parameters(remove_duplicate=False))
    return {name: value for name, value in net.state_dict().items() if name not in parameters}


@contextlib.contextmanager
def averaged_weights(trainer: Trainer) -> Iterator[torch.nn.Module]:
    """The bare network with the moving average as its weights, in evaluation mode; where the network is sharded, a
    whole one beside it, on the main process. Every process must ask for it."""
    if is_sharded(trainer.net):
        average, net = whole(_buffers(trainer.net) | _average(trainer)), trainer.bare_net()
        if trainer.accelerator.is_main_process:
            net.load_state_dict(average, strict=False)  # weights that are tied have one name
            net.to(trainer.accelerator.device)
        yield net.eval()
        return
    trainer.ema.store(trainer.net.parameters())
    trainer.ema.copy_to(trainer.net.parameters())
    try:
        yield trainer.net.eval()
    finally:
        trainer.net.train()
        trainer.ema.restore(trainer.net.parameters())


def step_batches(trainer: Trainer) -> Iterator[Batch]:
    """This process' share of the batch of every step still to be done, each in ``accumulation`` parts."""
    experiment, accelerator = trainer.experiment, trainer.accelerator
    size = experiment.batch_size // (accelerator.num_processes * experiment.accumulation)
    first = accelerator.process_index * size * experiment.accumulation
    dropout, waiting = experiment.condition_dropout if trainer.denoiser.conditions else 0.0, []

    def draws() -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
        for step, part in itertools.product(range(trainer.step, experiment.steps), range(experiment.accumulation)):
            start = first + part * size
            generators = image_generators(experiment.seed, step, start, size, accelerator.device)
            index = image_indices(experiment.seed, len(trainer.data), step * experiment.batch_size + start, size)
            flip = random_index(2, size, generators, device="cpu").bool() if experiment.flip else None
            dropped = uniform(size, generators, device="cpu") < dropout if dropout else None
            places = crop_places(trainer.data, generators)
            rows = rows_of(trainer.data, index, flip, dropped, trainer.denoiser.conditions, places)
            waiting.append((rows, generators))
            yield index, flip, places

    for x0 in trainer.data.prefetch(draws()):
        yield x0, *waiting.pop(0)


def _check_finite(trainer: Trainer, run: RunDirectory, loss: float) -> None:
    """End a run whose loss or weights are not finite."""
    if not (math.isfinite(loss) and all(bool(weight.isfinite().all()) for weight in trainer.net.parameters())):
        saved = [path.name for path in list_checkpoints(run.checkpoints)]
        last = f"the last good checkpoint is {saved[-1]}" if saved else "there is no checkpoint yet"
        problem = f"made the run diverge: up to step {trainer.step} the loss is {loss:g}, or weights are not finite"
        remedy = f"{last}; begin a new run with a smaller `learning_rate`, or with `precision` fp32"
        raise InputError("learning_rate", trainer.experiment.learning_rate, problem, remedy)


def anyone(accelerator: Accelerator, flag: bool) -> bool:
    """Whether the flag is set on any process."""
    if accelerator.num_processes == 1:
        return flag
    return bool(accelerator.reduce(torch.tensor(float(flag), device=accelerator.device)).item())


@contextlib.contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """A list that fills when SIGINT or SIGTERM arrives, so that the loop can stop between two steps."""
    received: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda n, _: received.append(n)) for number in signals}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
