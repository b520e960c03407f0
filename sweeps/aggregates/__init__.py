"""What a run computes from its cells. `registry` builds the kinds, `results` finishes them; contracts are in `base`."""

from .base import CellResult, State, Sum
from .fit import Fit

__all__ = ["CellResult", "Fit", "State", "Sum"]
