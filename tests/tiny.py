"""Tiny random models of every family: 3 layers, width 32, built from their config classes in milliseconds, seeded."""

from __future__ import annotations

import torch
import transformers

VOCAB = 100
_IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
_BASE = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, **_IDS,
)  # fmt: skip
_GEMMA = dict(_BASE, head_dim=16, sliding_window=8, query_pre_attn_scalar=16, tie_word_embeddings=True)
_MOE = dict(_BASE, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2)

_FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", _BASE),
    "mistral": ("Mistral", dict(_BASE, sliding_window=8)),
    "qwen2": ("Qwen2", _BASE),
    "qwen3": ("Qwen3", dict(_BASE, head_dim=16)),
    "gemma2": ("Gemma2", _GEMMA),
    "gemma3": ("Gemma3Text", dict(_GEMMA, layer_types=["sliding_attention", "full_attention", "sliding_attention"])),
    "gpt2": ("GPT2", dict(vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=512, **_IDS)),
    "mixtral": ("Mixtral", dict(_BASE, num_local_experts=6, num_experts_per_tok=2)),
}  # fmt: skip

FAMILIES = tuple(_FAMILIES)
MOE_FAMILIES = ("mixtral",)


def tiny_config(family: str, **overrides):
    name, settings = _FAMILIES[family]
    return getattr(transformers, f"{name}Config")(**{**settings, **overrides})


def tiny(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides) -> torch.nn.Module:
    """A random causal model of `family` in eval mode, seeded. `overrides` go to its config.

    Weights are larger than at initialisation, norms and biases are not 1 and 0, so that every part matters.
    """
    config = tiny_config(family, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
                else:
                    parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model.to(dtype).eval().requires_grad_(False)


def token_ids(rows: int = 1, length: int = 12, seed: int = 0) -> torch.Tensor:
    """Seeded token ids [rows, length], none of them pad, bos or eos."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
