"""What can be known of a model without its weights: whether it is there to be loaded, and its architecture.

Reads configurations, file lists and headers only. A hub is asked once and briefly, and only about hub ids that its cache
does not hold. What was found is kept for the life of the process.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

from . import sources
from .adapter_config import why_not
from .errors import CannotLoad

HUB_TIMEOUT_S = 10.0
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


@functools.lru_cache(maxsize=256)
def require(name: str, *, revision: str | None = None, adapter: str | None = None) -> None:
    """CannotLoad, with what was tried, unless `load(name, revision=..., adapter=...)` finds everything it reads.

    Checks that files are there and whole, not that values are sensible; no weights are read.
    """
    kind = sources.kind(name)
    if kind == "adapter":
        if adapter is not None:
            raise CannotLoad(f"{name!r} is itself an adapter folder, given with adapter={adapter!r}; give one")
        base = sources.adapter_config(name).get("base_model_name_or_path")
        if not base:
            raise CannotLoad(f"adapter {name!r} names no base model; name the base, and the adapter beside it")
        return require(base, revision=revision, adapter=name)
    if kind == "embedded":
        if not _dequantised(name):
            sources.embedded_file(name)
    else:
        config_of(name, revision)
    if kind == "folder":
        _require_files(Path(name).expanduser(), name)
    elif kind == "hub" and not _is_whole(cached(name, revision)):
        files = on_hub(name, revision)
        if not any({weights, f"{weights}.index.json"} & files for weights in _WEIGHTS):
            raise CannotLoad(f"{name!r} on the hub has no weights: none of {', '.join(_WEIGHTS)}")
    if adapter is not None:
        require_adapter(adapter)
    return None


def require_adapter(folder: str) -> dict[str, Any]:
    """The configuration of a PEFT adapter folder that can be attached; CannotLoad for any other."""
    config = sources.adapter_config(folder)
    if reasons := why_not(config):
        raise CannotLoad(f"adapter {folder!r} cannot differ per row of a batch: {'. '.join(reasons)}")
    stored = [Path(folder).expanduser() / f"adapter_model.{end}" for end in ("safetensors", "bin")]
    found = next((file for file in stored if file.is_file()), None)
    if found is None:
        raise CannotLoad(f"adapter {folder!r} has no adapter_model.safetensors; save it with its weights")
    _require_whole(found, f"adapter {folder!r}")
    return config


@functools.lru_cache(maxsize=64)
def config_of(name: str, revision: str | None = None) -> Any:
    """The transformers configuration of a model (of its base, for an adapter folder). CannotLoad says why not."""
    from transformers import AutoConfig

    kind = sources.kind(name)
    if kind == "adapter":
        return config_of(sources.adapter_config(name).get("base_model_name_or_path") or "", revision)
    here = cached(name, revision) if kind == "hub" else Path(name).expanduser()
    if here is None:
        on_hub(name, revision)
    try:
        if kind in ("gguf", "embedded"):
            return _gguf_config(name, kind)
        return AutoConfig.from_pretrained(here or name, revision=revision, local_files_only=here is not None)
    except CannotLoad:
        raise
    except Exception as error:
        what = {"folder": "model folder", "gguf": "GGUF file", "hub": "hub id"}.get(kind, "embedded model")
        raise CannotLoad(f"cannot read the configuration of {what} {name!r}: {_one_line(error)}") from None


@functools.lru_cache(maxsize=16)
def skeleton(name: str, revision: str | None = None) -> Any:
    """The model without weights, on torch's meta device: what sites, layers and widths it has can be asked of it.

    Raises CannotLoad where its configuration cannot be read or builds no causal language model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = config_of(name, revision)
    if name in sources.UPCYCLED:
        from .upcycle import sparse_config

        config = sparse_config(config)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config).eval()
    except Exception as error:
        raise CannotLoad(f"cannot build {name!r} from its configuration: {_one_line(error)}") from None


def cached(name: str, revision: str | None = None) -> Path | None:
    """The folder of a hub id in the hub's cache, if its configuration and weights are there."""
    from huggingface_hub import try_to_load_from_cache

    try:
        file = try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError as error:  # no name that a hub could have
        raise CannotLoad(f"no hub id {name!r}: {_one_line(error)}") from None
    if not isinstance(file, str):
        return None
    folder = Path(file).parent
    return folder if any((folder / w).exists() or (folder / f"{w}.index.json").exists() for w in _WEIGHTS) else None


@functools.lru_cache(maxsize=64)
def on_hub(name: str, revision: str | None) -> frozenset[str]:
    """Names of the files that the hub has of a model; CannotLoad says what was tried."""
    from huggingface_hub import HfApi, constants

    try:
        found = HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT_S)
    except Exception as error:
        at = f" at revision {revision!r}" if revision else ""
        raise CannotLoad(
            f"no model {name!r}{at}: no such folder, not whole in the hub's cache ({constants.HF_HUB_CACHE}), and asking "
            f"{constants.ENDPOINT} gave: {_one_line(error)}; possible: {sources.possible()}"
        ) from None
    return frozenset(file.rfilename for file in found.siblings or ())


def _dequantised(name: str) -> Path | None:
    """The folder of an embedded model that was de-quantised before."""
    label = sources.UPCYCLED.get(name, name)
    return next((f.parent for f in sorted((sources.cache_dir() / "models").glob(f"{label}-*/config.json"))), None)


def _gguf_config(name: str, kind: str) -> Any:
    from transformers import AutoConfig

    if kind == "embedded" and (done := _dequantised(name)):
        return AutoConfig.from_pretrained(done, local_files_only=True)
    file = sources.embedded_file(name) if kind == "embedded" else Path(name).expanduser()
    return AutoConfig.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)


def _is_whole(folder: Path | None) -> bool:
    """Nothing of it has to be fetched any more."""
    try:
        return folder is not None and _require_files(folder, "") is None
    except CannotLoad:
        return False


def _require_files(folder: Path, name: str) -> None:
    if not any((folder / file).exists() for file in _TOKENIZERS):
        raise CannotLoad(f"model {name!r} has no tokenizer: none of {', '.join(_TOKENIZERS)}; save it there too")
    _require_weights(folder, name)


def _require_weights(folder: Path, name: str) -> None:
    for weights in _WEIGHTS:
        if (folder / weights).exists():
            return _require_whole(folder / weights, f"model {name!r}")
        index = folder / f"{weights}.index.json"
        if index.exists():
            try:
                shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (OSError, ValueError, KeyError, AttributeError) as error:
                raise CannotLoad(f"model {name!r}: cannot read {index.name}: {_one_line(error)}") from None
            for shard in shards:
                _require_whole(folder / shard, f"model {name!r}")
            return None
    files = ", ".join(sorted(p.name for p in folder.iterdir())[:8])
    raise CannotLoad(f"model {name!r} has no weights: none of {', '.join(_WEIGHTS)}; it has: {files}")


def _require_whole(file: Path, whose: str) -> None:
    """Readable, and for safetensors as long as its header says."""
    from safetensors import SafetensorError, safe_open

    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="numpy"):
                pass
        else:
            with file.open("rb") as opened:
                opened.read(1)
    except (OSError, SafetensorError) as error:
        raise CannotLoad(f"{whose}: cannot read {os.fspath(file)!r}: {_one_line(error)}") from None


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 240 else f"{text[:240]}..."
