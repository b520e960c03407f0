"""What is computed from a finished conversation: analyzers (functions of the user's) and judges (models that are asked).

A conversation is kept whatever they do: one that raises, or returns what is no outcome, leaves a text outcome
`failed.<its name>` that says why, and the others go on.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..folder.analyses import FAILED
from ..folder.writer import outcome_row
from ..redact import redact
from .judges import Judge

if TYPE_CHECKING:
    from interlens.work import Steps

Analyzers = Mapping[str, Callable[[Any], Mapping[str, Any]]]
"""Import path -> function of a conversation that returns outcomes: names to numbers or texts."""


def imported(paths: Sequence[str]) -> Analyzers:
    """The functions at import paths (`module:function`). ConfigError, with the reason, for one that is not there."""
    found = {}
    for path in paths:
        module, _, name = path.partition(":")
        try:
            found[path] = getattr(importlib.import_module(module), name)
        except Exception as error:
            raise ConfigError(
                f"scenario.analyzers: cannot import {path!r} where replicas run: {type(error).__name__}: {error}; "
                "install its module there, or put it where the driver's PYTHONPATH leads on every node"
            ) from None
    return found


def analysed(conversation: Any, analyzers: Analyzers, judges: Sequence[Judge]) -> Steps:
    """Outcomes of a conversation by all of them, failures included; see `FAILED`."""
    outcomes: dict[str, Any] = {}
    said = conversation.transcript
    for name, analyze in analyzers.items():
        conversation.transcript = said.copy()  # whatever one does to it, the next sees what was said
        try:
            outcomes.update(_checked(analyze(conversation)))
        except (Exception, SystemExit) as error:
            outcomes[FAILED + name] = _why(error)
    conversation.transcript = said
    for judge in judges:
        try:
            outcomes.update(_checked((yield from judge.steps(conversation))))
        except Exception as error:
            outcomes[FAILED + judge.name] = _why(error)
    return outcomes


def num_failed(outcomes: Mapping[str, Any]) -> int:
    """How many analyses of a cell have failed."""
    return sum(name.startswith(FAILED) for name in outcomes)


def _checked(found: Any) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise TypeError(f"it returned a {type(found).__name__}; it must return a mapping of names to numbers or texts")
    outcome_row(found)
    return found


def _why(error: BaseException) -> str:
    """Type, text and place of an error, without secrets."""
    frames = traceback.extract_tb(sys.exc_info()[2])
    at = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
    return redact(f"{type(error).__name__}: {error}{at}")[:1500]
