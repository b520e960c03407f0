"""`python -m sweeps` is the `sweeps` command. Modules that lie in the working directory are not imported by it."""

from __future__ import annotations

import os
import sys

if sys.path and sys.path[0] == os.getcwd() and not sys.flags.safe_path:
    del sys.path[0]  # what `-m` puts first; PYTHONPATH stays

from .cli import main

sys.exit(main())
