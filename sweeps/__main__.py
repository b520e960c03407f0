"""`python -m sweeps` is the `sweeps` command."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
