"""A network, a basis of Σ and a sampler of your own: python examples/your_own.py"""

import subprocess
import sys

import torch

import nidiff
from nidiff.covariance import BASES, Basis
from nidiff.sampling import SAMPLERS, Sampler


class Haar(Basis):  # wavelets over the last axis
    def __init__(self, shape):
        self.event_shape, self.matrix, self.scale = tuple(shape), torch.ones(1, 1, dtype=torch.float64), torch.zeros(1)
        while (n := len(self.matrix)) < shape[-1]:
            parts = torch.kron(self.matrix, torch.ones(1, 2)), torch.kron(torch.eye(n), torch.tensor([[1.0, -1.0]]))
            self.matrix = torch.cat(parts) / 2**0.5
            self.scale = torch.cat([self.scale, self.scale.max() + torch.ones(n)])

    def analyse(self, x):
        return x @ self.matrix.T.to(x)

    def synthesise(self, coefficients):
        return coefficients @ self.matrix.to(coefficients)

    def arguments(self):
        return {"shape": self.event_shape}


def wavelets(size, ratio=2.0):  # the variance falls by `ratio` from each scale to the next finer one
    basis = Haar((size,))
    return nidiff.Covariance(ratio**-basis.scale, basis, normalize=True)


class Net(torch.nn.Sequential):  # predicts x0, which lies in [-1, 1]
    def __init__(self):
        first, second, last = (torch.nn.Linear(*size) for size in ((33, 128), (128, 128), (128, 32)))
        super().__init__(first, torch.nn.SiLU(), second, torch.nn.SiLU(), last, torch.nn.Tanh())

    def forward(self, x, label):
        return super().forward(torch.cat([x, label[:, None].to(x) / 50 - 1], 1))


def restless(chain, x, x0, here, there, *, rate: float = 1.0):  # renews the noise at `rate` times DDPM's pace
    share, noise = (here.signal / here.sigma * there.sigma / there.signal) ** rate, (x - here.signal * x0) / here.sigma
    return there.signal * x0 + there.sigma * (share * noise + (1 - share**2) ** 0.5 * chain.noise())


def main(folder="out/your_own", steps=3000):  # train on signals that jump once; save, load in a new process, sample
    denoiser = nidiff.Denoiser(Net(), nidiff.Process(nidiff.schedules.ddpm_cosine(100), wavelets(32)), target="x0")
    optimizer = torch.optim.Adam(denoiser.parameters(), 1e-3)
    for _ in range(steps):
        jumps = torch.where(torch.arange(32) < torch.randint(1, 32, (256, 1)), 1.0, -1.0) * torch.randn(256, 1).sign()
        optimizer.zero_grad()
        nidiff.denoising_loss(denoiser, jumps, weighting="target").mean().backward()
        optimizer.step()
    nidiff.save_model(denoiser, folder)
    return subprocess.run([sys.executable, __file__, folder], check=True, capture_output=True, text=True).stdout


BASES["Haar"], SAMPLERS["restless"] = Haar, Sampler(restless, spacing="trailing", num_steps=50)
if __name__ == "__main__" and len(sys.argv) > 1:  # the new process has the folder and nothing else
    samples = nidiff.sample(nidiff.load_model(sys.argv[1], net=Net()), (500, 32), sampler="restless:rate=1.5")
    once, off = (samples.sign().diff() != 0).sum(1) == 1, (samples.abs() - 1).square().mean().sqrt()
    print(f"{once.double().mean():.1%} of 500 samples jump exactly once; their values differ from ±1 by {off:.2f}")
elif __name__ == "__main__":
    print(main(), end="")
