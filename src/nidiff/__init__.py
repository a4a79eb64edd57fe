"""Diffusion models with non-isotropic Gaussian noise.

The public names are listed in ``__init__.pyi``; each is imported when it is first used, so ``import nidiff`` is quick.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = "0.3.0"
