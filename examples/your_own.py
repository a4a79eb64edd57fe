"""A network, a covariance family and a sampler of your own: python examples/your_own.py"""

import subprocess
import sys

import torch

import nidiff
from nidiff.covariance.fields import FAMILIES
from nidiff.sampling.sampler import SAMPLERS


class Haar(nidiff.Covariance):  # wavelets; the variance falls by `ratio` from each scale to the next finer one
    def __init__(self, shape, ratio=2.0):
        self.matrix, scale = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1)
        while (n := len(self.matrix)) < shape[-1]:
            parts = torch.kron(self.matrix, torch.ones(1, 2)), torch.kron(torch.eye(n), torch.tensor([[1.0, -1.0]]))
            self.matrix, scale = torch.cat(parts) / 2**0.5, torch.cat([scale, scale.max() + torch.ones(n)])
        super().__init__(shape, ratio**-scale)

    def to_basis(self, x):
        return x @ self.matrix.T.to(x)

    def from_basis(self, coefficients):
        return coefficients @ self.matrix.to(coefficients)


class Net(torch.nn.Sequential):  # predicts x0, which lies in [-1, 1]
    def __init__(self):
        first, second, last = (torch.nn.Linear(*size) for size in ((33, 128), (128, 128), (128, 32)))
        super().__init__(first, torch.nn.SiLU(), second, torch.nn.SiLU(), last, torch.nn.Tanh())

    def forward(self, x, label):
        return super().forward(torch.cat([x, label[:, None].to(x) / 50 - 1], 1))


def restless(chain, x, x0, here, there, *, rate: float = 1.0):  # renews the noise at `rate` times DDPM's pace
    kept, noise = (here.signal / here.sigma * there.sigma / there.signal) ** rate, (x - here.signal * x0) / here.sigma
    return there.signal * x0 + there.sigma * (kept * noise + (1 - kept**2) ** 0.5 * chain.noise())


def main(folder="out/your_own", steps=3000):  # train on signals that jump once; save, load in a new process, sample
    denoiser = nidiff.Denoiser(Net(), nidiff.Process(nidiff.ddpm_cosine(100), Haar((32,))), target="x0")
    optimizer = torch.optim.Adam(denoiser.parameters(), 1e-3)
    for _ in range(steps):
        jumps = torch.where(torch.arange(32) < torch.randint(1, 32, (256, 1)), 1.0, -1.0) * torch.randn(256, 1).sign()
        optimizer.zero_grad()
        nidiff.denoising_loss(denoiser, jumps, weighting="target").mean().backward()
        optimizer.step()
    nidiff.save_model(denoiser, folder)
    return subprocess.run([sys.executable, __file__, folder], check=True, capture_output=True, text=True).stdout


FAMILIES["Haar"], SAMPLERS["restless"] = Haar, nidiff.Sampler(restless, spacing="trailing", num_steps=50)
if __name__ == "__main__" and len(sys.argv) > 1:  # the new process has the folder and nothing else
    samples = nidiff.sample(nidiff.load_model(sys.argv[1], net=Net()), (500, 32), sampler="restless:rate=1.5")
    once, off = (samples.sign().diff() != 0).sum(1) == 1, (samples.abs() - 1).square().mean().sqrt()
    print(f"{once.double().mean():.1%} of 500 samples jump exactly once; their values differ from ±1 by {off:.2f}")
elif __name__ == "__main__":
    print(main(), end="")
