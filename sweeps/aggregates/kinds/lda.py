"""LDA: the difference of means whitened by the shared within-class covariance (Ledoit-Wolf shrinkage).

lda: {contrast: "framing == 'warm' vs framing == 'cold'", split: item}
"""

from __future__ import annotations

from ..contrasts import ProbeFit


class Lda(ProbeFit):
    """A Fit: one pass over the stored vectors of each place."""

    kind = method = "lda"


AGGREGATE = Lda
