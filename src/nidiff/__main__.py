"""``python -m nidiff`` is ``nidiff``."""

import sys

from nidiff.cli import main

sys.exit(main())
