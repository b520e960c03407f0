"""Steering directions for llama.cpp: GGUF control vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .locate import decoder_layers
from .steering import SteeringSpec


def export_control_vector(
    spec: SteeringSpec, path: str | Path, model: Any = None, model_hint: str | None = None
) -> None:
    """Write `spec` as a GGUF control vector, which llama.cpp adds to the residual stream (`--control-vector`).

    Tensor `direction.N` (float32) is coef x direction at the output of layer N, 0-based, as in llama.cpp's
    `llama_adapter_cvec`; it cannot steer layer 0. `model_hint` is the architecture's llama.cpp name (by default the
    model's `model_type`). ValueError for what llama.cpp cannot do: other modes, sites, token selections, layer 0.
    """
    import gguf

    if spec.mode != "add" or spec.site != "residual" or spec.tokens.op != "all":
        raise ValueError(
            f"llama.cpp adds to the residual of all tokens; this spec has mode {spec.mode!r}, site {spec.site!r}, "
            f"tokens {spec.tokens}"
        )
    count = len(decoder_layers(model)) if model is not None else None
    if count is None and min(spec.layers) < 0:
        raise ValueError("negative layers need model=")
    layers = {layer % count if count else layer: spec.vector(layer) for layer in spec.layers}
    if 0 in layers:
        raise ValueError("llama.cpp cannot steer layer 0; leave it out")
    hint = model_hint or (model.config.model_type if model is not None else None)
    if hint is None:
        raise ValueError("give model_hint= (llama.cpp's name of the architecture) or model=")
    writer = gguf.GGUFWriter(str(path), "controlvector")
    writer.add_string("controlvector.model_hint", hint)
    writer.add_uint32("controlvector.layer_count", max(layers) if count is None else count - 1)
    for layer, vector in sorted(layers.items()):
        writer.add_tensor(f"direction.{layer}", (spec.coef * vector).float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
