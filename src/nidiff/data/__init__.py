"""Data sets [N, C, *event]: images, signals, fields, volumes and video, with their units and coordinates.

The names in ``__init__.pyi`` are imported when they are first used: the command line must set up its threads before
torch is imported.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
