"""From a model to files: seeds, jobs, observations and restorations. ``restore`` draws what items were, from Python."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
