"""RePaint's resampling (Lugmayr et al. 2022), with coloured noise: every step is taken several times."""

from torch import Tensor

from nidiff.diffusion.schedule import Level
from nidiff.recipe import check_whole
from nidiff.sampling.ancestral import ancestral, jump_variances
from nidiff.sampling.step import Chain

MOST_REPEATS = 1000


def repaint(chain: Chain, x: Tensor, x0: Tensor, here: Level, there: Level, *, repeats: int = 5) -> Tensor:
    """`ancestral`, and then, ``repeats`` − 1 times, back up as the process goes and down again with a new x̂0:

        x = (signal/signal') x' + √β Σ^½ z

    It leaves every marginal as it is. Where x̂0 is replaced by what a mask sees (`nidiff.posterior`,
    method="replacement"), it is what makes the rest agree with it. Every repeat calls the network once.
    """
    check_whole("repeats", repeats, 1, MOST_REPEATS)
    beta = jump_variances(here, there)[0].root()
    x = ancestral(chain, x, x0, here, there)
    for _ in range(repeats - 1):
        above = here.signal / there.signal * x + beta * chain.noise()
        x = ancestral(chain, above, chain.denoiser(above, here), here, there)
    return x
