"""Whether a judge can be asked: its prompt, its model, its columns."""

from __future__ import annotations

from ..config.limits import NAME, one_of
from ..config.schema import JudgeConfig, SweepConfig
from ..errors import ConfigError, did_you_mean
from ..redact import redact

ANSWERS = ("number", "choice", "text")

TRANSCRIPT = "transcript"


def check(config: SweepConfig, name: str, judge: JudgeConfig) -> None:
    """ConfigError for a judge that cannot be asked."""

    at, cast = f"scenario.judges.{name}", config.scenario.participants
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot name a judge; use up to 64 letters, digits, '_', '-', '.' or blanks")
    one_of(f"{at}.kind", judge.kind, ("model", "api"))
    one_of(f"{at}.answer", judge.answer, ANSWERS)
    if f"{{{TRANSCRIPT}}}" not in judge.prompt:
        raise ConfigError(
            f"{at}.prompt does not hold {{{TRANSCRIPT}}}, so the judge would see nothing of what was said"
        )
    for who in judge.participants:
        if who not in cast:
            raise ConfigError(f"{at}.participants: no participant {who!r}{did_you_mean(who, cast)}")
    if judge.answer == "choice" and len(judge.choices) < 2:
        raise ConfigError(f"{at}.choices: {list(judge.choices)}; answer: choice needs at least two")
    if judge.range and not (len(judge.range) == 2 and judge.range[0] < judge.range[1]):
        raise ConfigError(f"{at}.range is {list(judge.range)}; give [lowest, highest]")
    if judge.base_url and redact(judge.base_url) != judge.base_url:
        raise ConfigError(f"{at}.base_url holds a secret; give it in the provider's environment variable instead")
    if judge.max_in_flight < 1 or judge.timeout_s <= 0:
        raise ConfigError(f"{at}.max_in_flight must be at least 1 and timeout_s above 0")
    if judge.temperature < 0 or judge.max_new_tokens < 1:
        raise ConfigError(f"{at}: temperature must be at least 0 and max_new_tokens at least 1")


def columns_check(config: SweepConfig) -> list[tuple[str, str]]:
    """(where, text) of prompts that an item's columns fill, the transcript left out."""
    found = config.scenario.judges.items()
    return [(f"scenario.judges.{n}.prompt", j.prompt.replace(f"{{{TRANSCRIPT}}}", "")) for n, j in found]
