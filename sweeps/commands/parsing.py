"""How commands read their arguments: argparse, whose complaints are one line."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import ConfigError


class Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError, with its usage, for what does not fit."""

    def error(self, message: str) -> Any:
        raise ConfigError(f"{message}; {self.format_usage().strip()}")


class Done(Exception):
    """A command has said all it had to say."""
