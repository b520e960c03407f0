"""Which PEFT adapters can differ per row of a batch, told by their `adapter_config.json` alone.

Rows of one batch share the base's weights, so an adapter may only add to what a module gives: plain LoRA does. What
changes weights, structure or other modules is refused here, by name, before anything is loaded. A key that is not
known here is refused unless it is off: a new PEFT cannot bring an option that acts silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ADDS = frozenset({
    "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "lora_bias", "lora_dropout", "fan_in_fan_out",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
})  # fmt: skip
"""Keys of LoRA that act per row as in PEFT's own forward. Dropout acts in training only."""

ASIDE = frozenset({
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "megatron_core", "qalora_group_size", "runtime_config", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
})  # fmt: skip
"""Keys that say nothing of the forward, or act only with another key that is judged by itself."""

REFUSED = {
    "use_dora": "DoRA scales whole weights",
    "modules_to_save": "it replaces whole modules",
    "trainable_token_indices": "it replaces rows of the embedding",
    "layer_replication": "it changes the stack of layers",
    "alora_invocation_tokens": "aLoRA begins at tokens that a row has, which a batch cannot tell PEFT",
    "target_parameters": "it adds to parameters (of experts) for every row at once",
    "megatron_config": "Megatron's layers are others",
    "use_qalora": "QALoRA pools its inputs in groups",
    "arrow_config": "Arrow routes between adapters",
    "use_bdlora": "BD-LoRA splits its matrices",
    "monteclora_config": "MonteCLoRA draws its weights",
    "velora_config": "VeLoRA changes how inputs are kept",
    "kasa_config": "KaSA changes the base's weights",
    "ensure_weight_tying": "it ties the adapter of the embedding to the head",
}
"""Key -> why it cannot differ per row."""

KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initialisations (`init_lora_weights`) that leave the base as it is; the weights in the file replace what they draw."""

MERGE = "merge it into its base (PEFT's merge_and_unload), and load the merged folder as a model of its own"
CONVERT = (
    "its weights add to a base that the initialisation changed; save it again from training with PEFT's "
    "`save_pretrained(folder, path_initial_model_for_weight_conversion=<the adapter as it was initialised>)`, "
    "which writes the difference as plain LoRA of rank 2r"
)


def why_not(config: Mapping[str, Any]) -> list[str]:
    """Why an adapter with this `adapter_config.json` cannot be attached; empty where it can. One entry per key."""
    if (kind := config.get("peft_type")) != "LORA":
        return [f"peft_type {getattr(kind, 'value', kind)}: only LoRA adds per row; {MERGE}"]
    reasons = []
    for key, value in config.items():
        if key in ADDS or key in ASIDE or _is_off(key, value):
            continue
        if key == "bias":
            reasons.append(f"bias={value!r}: it changes biases of the base for every row; {MERGE}")
        elif key == "init_lora_weights":
            if value not in KEEPS_BASE:
                reasons.append(f"init_lora_weights={value!r}: {CONVERT}")
        elif key in REFUSED:
            reasons.append(f"{key}: {REFUSED[key]}; {MERGE}")
        else:
            reasons.append(f"{key}={value!r}: this version does not know whether that can differ per row; {MERGE}")
    return reasons


def _is_off(key: str, value: Any) -> bool:
    """A number is never off: nobody knows what 0 means to an option of a later PEFT."""
    empty = isinstance(value, list | dict | tuple | set) and not value
    return value in (None, "none") if key == "bias" else value is None or value is False or empty
