"""`python -m sweeps` is the `sweeps` command."""

import sys

from .cli import main

sys.exit(main())
