"""The errors this package raises on purpose.

Each carries one message and nothing else, so that it survives pickling between processes. A message says what was
given, what was possible, and what to do.
"""


class InterlensError(Exception):
    """Base of every error raised on purpose."""


class UnsupportedIntervention(InterlensError):
    """A capture, steering, patch or logprob request names a participant or model that cannot serve it."""


class UnknownSite(InterlensError, ValueError):
    """A site, layer or selection does not exist in this model; the message lists those that do."""


class HookDidNotFire(InterlensError):
    """A requested site was never reached during a forward, so its data would have been silently missing.

    `missing` holds the (layer, site) pairs concerned.
    """

    missing: tuple[tuple[int, str], ...] = ()


class NonFinite(InterlensError):
    """A live row produced NaN or infinite logits; the message names the first bad layer."""


class ContextOverflow(InterlensError):
    """A prompt plus its generation budget does not fit the context limit."""


class CannotLoad(InterlensError, ValueError):
    """A model, tokenizer or adapter could not be loaded; the message says what was tried and the root cause."""


class APIFailed(InterlensError):
    """A chat API gave no answer, however often it was asked."""


class BudgetExceeded(InterlensError):
    """The tokens or the money of a participant are used up."""
