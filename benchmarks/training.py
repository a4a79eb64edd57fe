"""How fast is our training loop beside a plain diffusers loop? How much of a step is not the network or optimiser?

The peer is a loop as diffusers' unconditional example writes it: a DataLoader over the data set with per-image
transforms, DDPMScheduler.add_noise, mean squared error, AdamW, EMAModel, float32. Ours is what ``nidiff train`` runs,
in the precision it would choose here. Both train the same U-Net with the same batch, a step each in turn.
"""

import argparse
import time
from collections.abc import Callable, Iterator

import torch
from diffusers import DDPMScheduler
from diffusers.training_utils import EMAModel
from timing import Row, compare, interleave, log, report, summary, warn_if_busy

from nidiff.data.load import load_dataset
from nidiff.memory import keep_freed_memory
from nidiff.model.network import unet2d
from nidiff.training.build import Trainer, build
from nidiff.training.experiment import Experiment
from nidiff.training.loop import step_batches, train_step

OURS, THEIRS = "step of nidiff train", "step of a plain diffusers loop, float32"


def plain_loop(experiment: Experiment) -> Callable[[], None]:
    """One step of the loop of diffusers' unconditional example, on the same data, network and batch."""
    images = load_dataset(experiment.data.source, data_dir=experiment.data.data_dir)
    pixels = images.values.float() / 255

    class Data(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return len(pixels)

        def __getitem__(self, index: int) -> torch.Tensor:
            image = pixels[index]
            if torch.rand(()) < 0.5:
                image = image.flip(-1)
            return (image - 0.5) / 0.5

    loader = torch.utils.data.DataLoader(Data(), batch_size=experiment.batch_size, shuffle=True)
    net = unet2d(images.shape, widths=experiment.widths, layers=experiment.layers, attention=experiment.attention)
    ema = EMAModel(net.parameters(), decay=0.9999, use_ema_warmup=True, inv_gamma=1.0, power=3 / 4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6, eps=1e-8)
    scheduler = DDPMScheduler(num_train_timesteps=1000)

    def forever() -> Iterator[torch.Tensor]:
        while True:
            yield from loader

    batches = forever()

    def step() -> None:
        clean = next(batches)
        noise = torch.randn_like(clean)
        timesteps = torch.randint(0, 1000, (len(clean),))
        output = net(scheduler.add_noise(clean, noise, timesteps), timesteps).sample
        loss = torch.nn.functional.mse_loss(output, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ema.step(net.parameters())
        loss.item()

    return step


def our_loop(trainer: Trainer) -> Callable[[], None]:
    batches = step_batches(trainer)

    def step() -> None:
        train_step(trainer, batches).item()

    return step


def outside_share(trainer: Trainer, rounds: int) -> Row:
    """The share of a step spent outside the network's forward, the backward pass and the optimiser's step."""
    inside = 0.0

    def timed(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal inside
            start = time.perf_counter()
            result = function(*args, **kwargs)
            inside += time.perf_counter() - start
            return result

        return call

    step = our_loop(trainer)
    trainer.denoiser = trainer.denoiser.with_net(timed(trainer.denoiser.net))
    trainer.accelerator.backward = timed(trainer.accelerator.backward)
    trainer.optimizer.step = timed(trainer.optimizer.step)
    shares = []
    for _ in range(rounds):
        inside, start = 0.0, time.perf_counter()
        step()
        whole = time.perf_counter() - start
        shares.append((whole - inside) / whole)
    return summary("outside forward, backward and optimiser", "the whole step", shares, bound=0.03)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="pairs of steps")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warn_if_busy()
    experiment = Experiment(
        data=options.data,
        data_dir=options.data_dir,
        flip=True,
        widths=tuple(options.widths),
        layers=options.layers,
        attention=(len(options.widths) - 1,),
        batch_size=options.batch_size,
        steps=10**6,
    )
    theirs = plain_loop(experiment)  # first: ours changes how the process keeps memory
    log("building ours")
    keep_freed_memory()  # as the command does
    trainer = build(experiment)
    times = interleave({OURS: our_loop(trainer), THEIRS: theirs}, options.rounds)
    title = f"training, batch {experiment.batch_size}, {trainer.data.shape}, ours in {trainer.experiment.precision}"
    rows = [compare(times, THEIRS, OURS, note="bound: at least 1.5"), outside_share(trainer, options.rounds)]
    report({title: rows}, as_json=options.json)


if __name__ == "__main__":
    main()
