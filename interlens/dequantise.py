"""GGUF files, de-quantised once per machine.

A converted model is a folder that appears whole or not at all (written aside, synced, renamed), under a lock, so that
many processes started together convert once and the others wait for it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from .errors import CannotLoad
from .sources import cache_dir


def converted(gguf: Path, label: str) -> Path:
    """The folder with the bfloat16 model of `gguf` in the cache, `<label>-<hash of the file>`; made on first use."""
    from filelock import FileLock

    parent = cache_dir() / "models"
    target = parent / f"{label}-{file_hash(gguf)}"
    if target.is_dir():
        return target
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with FileLock(parent / f".{target.name}.lock"):
            if not target.is_dir():
                _convert(gguf, target)
    except PermissionError as error:
        raise CannotLoad(
            f"cannot write the model cache {parent}: {error}; set INTERLENS_CACHE to a folder of yours"
        ) from error
    return target


def file_hash(path: Path) -> str:
    """Of size, first and last MiB: enough to tell model files apart without reading gigabytes."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=6)
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
        file.seek(max(0, size - (1 << 20)))
        digest.update(file.read())
    return digest.hexdigest()


def _convert(gguf: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        where = {"gguf_file": gguf.name, "local_files_only": True}
        tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, **where)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, **where, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
        model.config.quantization_config = None
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        for file in part.iterdir():
            _fsync(file)
        part.chmod(0o755)
        part.rename(target)
        _fsync(target.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
