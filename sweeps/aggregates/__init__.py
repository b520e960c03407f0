"""What a run computes from its cells. `registry` builds the kinds, `results` finishes them; contracts are in `base`."""

from .base import CellResult, Fit, State, Sum

__all__ = ["CellResult", "Fit", "State", "Sum"]
