"""Where the shipped configuration lies."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError


def conf_dir() -> Path:
    """The shipped configuration: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(f"the shipped configuration is missing beside {package}; reinstall the package")
