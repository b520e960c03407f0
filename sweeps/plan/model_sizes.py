"""What is known of a model without loading it: its layers, width and vocabulary, from its configuration file."""

from __future__ import annotations

import functools
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interlens import preview, sources
from interlens.errors import CannotLoad

from ..config.schema import ModelConfig, SweepConfig
from ..errors import ConfigError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model. Widths in values per token."""

    name: str
    layers: int
    width: int
    vocabulary: int
    experts: int = 0
    heads_width: int = 0
    kv_width: int = 0
    item_bytes: int = 2
    """Bytes per value in its own dtype."""

    def site_width(self, site: str) -> int:
        """Values per token at a site (canonical name)."""
        special = {
            "logits": self.vocabulary, "router": self.experts, "q": self.heads_width, "head_out": self.heads_width,
            "k": self.kv_width, "v": self.kv_width,
        }  # fmt: skip
        return special.get(site) or self.width


def model(config: SweepConfig, name: str) -> ModelConfig:
    """The model a participant names: an entry of `models`, else the name itself as a source."""
    return config.models.get(name) or ModelConfig(source=name)


def model_name(config: SweepConfig, name: str) -> str:
    """What ids, folders and tables call a model: its name under `models`, else its source (a folder: its last part)."""
    if name in config.models or not Path(name).expanduser().is_dir():
        return name
    return Path(name).expanduser().resolve().name


def of(config: SweepConfig, name: str | None) -> Shape | None:
    """The shape of the model a participant names; None where it cannot be known without the network."""
    if name is None:
        return None
    entry = model(config, name)
    return _shape(entry.source, entry.revision, entry.dtype)


def model_type(config: SweepConfig, name: str | None) -> str | None:
    """What a model's own configuration calls its architecture ("llama"); None where it cannot be known."""
    entry = model(config, name or "")
    known = entry.source in sources.EMBEDDED or entry.source.endswith(".gguf")
    raw = _gguf_config(entry.source) if known else _hf_config(entry.source, entry.revision)
    return (raw or {}).get("model_type")


def check_source(source: str, where: str) -> None:
    """ConfigError unless `source` is an embedded name, an existing folder or file, or looks like a hub id."""
    if source in sources.EMBEDDED or "/" in source.strip("/") or Path(source).expanduser().exists():
        try:
            sources.kind(source)
        except CannotLoad as error:
            raise ConfigError(f"{where}: {error}") from None
        return
    raise ConfigError(
        f"{where}: no model {source!r}{did_you_mean(source, sources.EMBEDDED)}; "
        "or a model folder, or a hub id (owner/name)"
    )


@functools.lru_cache(maxsize=64)
def _shape(source: str, revision: str | None, dtype: str) -> Shape | None:
    raw = (
        _gguf_config(source) if source in sources.EMBEDDED or source.endswith(".gguf") else _hf_config(source, revision)
    )
    if raw is None:
        return None
    text = {**raw, **(raw.get("text_config") or {})}
    heads = _first(text, "num_attention_heads", "n_head") or 1
    width = _first(text, "hidden_size", "n_embd", "d_model")
    layers = _first(text, "num_hidden_layers", "n_layer", "num_layers")
    if not width or not layers:
        return None
    head = text.get("head_dim") or width // heads
    stored = dtype if dtype != "auto" else str(text.get("dtype") or text.get("torch_dtype") or "bfloat16")
    return Shape(
        name=source, layers=layers, width=width, vocabulary=text.get("vocab_size") or 0,
        experts=_first(text, "num_local_experts", "num_experts", "n_routed_experts")
        or 4 * (source in sources.UPCYCLED),
        heads_width=heads * head,
        kv_width=(text.get("num_key_value_heads") or heads) * head,
        item_bytes={"float32": 4, "float64": 8}.get(stored.removeprefix("torch."), 2),
    )  # fmt: skip


def _first(values: dict[str, Any], *names: str) -> Any:
    return next((values[name] for name in names if values.get(name)), None)


def _hf_config(source: str, revision: str | None) -> dict[str, Any] | None:
    folder = Path(source).expanduser()
    if folder.is_dir():
        file = folder / "config.json"
        if not file.is_file() and (folder / "adapter_config.json").is_file():
            base = json.loads((folder / "adapter_config.json").read_text()).get("base_model_name_or_path")
            return _hf_config(base, revision) if base else None
        return json.loads(file.read_text())
    try:
        if (folder := preview.cached(source, revision)) is not None:
            return json.loads((folder / "config.json").read_text())
        preview.on_hub(source, revision)
        from huggingface_hub import hf_hub_download

        return json.loads(Path(hf_hub_download(source, "config.json", revision=revision)).read_text())
    except Exception:  # unknown, gated or out of reach: `sweeps run` says so before it begins
        return None


def _gguf_config(source: str) -> dict[str, Any] | None:
    if source in sources.EMBEDDED:
        package, file, _ = sources.EMBEDDED[source]
        for done in sorted((sources.cache_dir() / "models").glob(f"{source}-*/config.json")):
            return json.loads(done.read_text())
        spec = importlib.util.find_spec(package)
        places = [Path(folder) / file for folder in (spec.submodule_search_locations or ())] if spec else []
    else:
        places = [Path(source).expanduser()]
    for place in places:
        if place.is_file():
            return _gguf_header(place)
    return None


def _gguf_header(file: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    fields = GGUFReader(str(file)).fields
    arch = str(fields["general.architecture"].contents())
    value = {key.removeprefix(f"{arch}."): field for key, field in fields.items() if key.startswith(f"{arch}.")}

    def read(key: str) -> Any:
        return int(value[key].contents()) if key in value else None

    return {
        "num_hidden_layers": read("block_count"), "hidden_size": read("embedding_length"),
        "num_attention_heads": read("attention.head_count"), "num_key_value_heads": read("attention.head_count_kv"),
        "num_experts": read("expert_count"), "vocab_size": read("vocab_size"),
    }  # fmt: skip
