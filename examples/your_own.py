"""Your own network, covariance family and sampler: train, save, load in a new process and sample."""

import subprocess
import sys

import torch

import nidiff
from nidiff.covariance.fields import FAMILIES
from nidiff.sampling.ancestral import mix
from nidiff.sampling.sampler import SAMPLERS


class Haar(nidiff.Covariance):  # wavelets, each finer scale with 1/ratio of the variance: for signals that jump
    def __init__(self, shape, ratio=4.0):
        self.matrix, scale = torch.ones(1, 1), torch.zeros(1)
        while (n := len(self.matrix)) < shape[-1]:
            parts = torch.kron(self.matrix, torch.ones(1, 2)), torch.kron(torch.eye(n), torch.tensor([[1.0, -1.0]]))
            self.matrix, scale = torch.cat(parts) / 2**0.5, torch.cat([scale, scale.max() + torch.ones(n)])
        super().__init__(shape, ratio**-scale)

    def to_basis(self, x):
        return x @ self.matrix.T.to(x)

    def from_basis(self, coefficients):
        return coefficients @ self.matrix.to(coefficients)


class Net(torch.nn.Sequential):
    def __init__(self):
        first, middle, last = torch.nn.Linear(33, 256), torch.nn.Linear(256, 256), torch.nn.Linear(256, 32)
        super().__init__(first, torch.nn.SiLU(), middle, torch.nn.SiLU(), last)

    def forward(self, x, label):
        return super().forward(torch.cat([x, label[:, None].to(x) / 100 - 1], 1))


def lazy(chain, x, x0, here, there, *, share: float = 0.3):  # DDIM that draws a share of the noise anew
    return mix(x, x0, here, there, share * there.sigma) + share * there.sigma * chain.noise()


def main(folder="out/your_own", steps=1500):
    denoiser = nidiff.Denoiser(Net(), nidiff.Process(nidiff.ddpm_cosine(200), Haar((32,))), target="v")
    optimizer = torch.optim.Adam(denoiser.parameters(), 1e-3)
    for _ in range(steps):
        jumps = torch.where(torch.arange(32) < torch.randint(4, 29, (256, 1)), *torch.randn(2, 256, 1))
        optimizer.zero_grad()
        nidiff.denoising_loss(denoiser, jumps).mean().backward()
        optimizer.step()
    nidiff.save_model(denoiser, folder)
    return subprocess.run([sys.executable, __file__, folder], check=True, capture_output=True, text=True).stdout


FAMILIES["Haar"], SAMPLERS["lazy"] = Haar, nidiff.Sampler(lazy, spacing="trailing", num_steps=25)
if __name__ == "__main__" and len(sys.argv) > 1:  # the new process has the folder and nothing else
    changes = nidiff.sample(nidiff.load_model(sys.argv[1], net=Net()), (500, 32), sampler="lazy:share=0.2").diff().abs()
    print(f"largest change {changes.amax(1).mean():.2f} (data: 1.13), median {changes.median():.3f} (data: 0)")
elif __name__ == "__main__":
    print(main())
