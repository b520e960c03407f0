"""Logistic: the direction of a logistic regression on standardised columns.

logistic: {contrast: "framing == 'warm' vs framing == 'cold'", split: item}
"""

from __future__ import annotations

from ..contrasts import ProbeFit


class Logistic(ProbeFit):
    """A Fit: one pass over the stored vectors of each place."""

    kind = method = "logistic"


AGGREGATE = Logistic
