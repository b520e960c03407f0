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
_SIGMOID = dict(
    _BASE, moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, n_group=4,
    topk_group=2, first_k_dense_replace=1, routed_scaling_factor=1.5,
)  # fmt: skip
_LATENT = dict(
    _SIGMOID, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
    v_head_dim=8, head_dim=8,
)  # fmt: skip
_SCALES = dict(embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.3, logits_scaling=2.0)

_FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", _BASE),
    "mistral": ("Mistral", dict(_BASE, sliding_window=8)),
    "qwen2": ("Qwen2", _BASE),
    "qwen3": ("Qwen3", dict(_BASE, head_dim=16)),
    "gemma2": ("Gemma2", _GEMMA),
    "gemma3": ("Gemma3Text", dict(_GEMMA, layer_types=["sliding_attention", "full_attention", "sliding_attention"])),
    "gpt2": ("GPT2", dict(vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=512, **_IDS)),
    "opt": ("OPT", dict(_BASE, ffn_dim=48, word_embed_proj_dim=32)),
    "opt_post_norm": ("OPT", dict(_BASE, ffn_dim=48, word_embed_proj_dim=16, do_layer_norm_before=False)),
    "gpt_neox": ("GPTNeoX", _BASE),
    "gpt_neox_sequential": ("GPTNeoX", dict(_BASE, use_parallel_residual=False)),
    "falcon": ("Falcon", dict(_BASE, multi_query=True, parallel_attn=True, new_decoder_architecture=False)),
    "falcon_new": ("Falcon", dict(_BASE, num_kv_heads=2, new_decoder_architecture=True, num_ln_in_parallel_attn=2)),
    "falcon_sequential": ("Falcon", dict(_BASE, multi_query=False, parallel_attn=False, bias=True)),
    "phi3": ("Phi3", dict(_BASE, sliding_window=8)),
    "gemma": ("Gemma", dict(_BASE, head_dim=16, tie_word_embeddings=True)),
    "olmo2": ("Olmo2", _BASE),
    "olmo3": ("Olmo3", dict(_BASE, sliding_window=8)),
    "glm4": ("Glm4", dict(_BASE, head_dim=16)),
    "granite": ("Granite", dict(_BASE, **_SCALES)),
    "granitemoe": ("GraniteMoe", dict(_BASE, num_local_experts=6, num_experts_per_tok=2, **_SCALES)),
    "phimoe": ("Phimoe", dict(_BASE, num_local_experts=6, num_experts_per_tok=2, sliding_window=8)),
    "olmoe": ("Olmoe", dict(_BASE, num_experts=6, num_experts_per_tok=2)),
    "qwen2_moe": ("Qwen2Moe", dict(_MOE, shared_expert_intermediate_size=40, decoder_sparse_step=2)),
    "qwen3_moe": ("Qwen3Moe", dict(_MOE, head_dim=16, mlp_only_layers=[1])),
    "qwen3_next": ("Qwen3Next", dict(
        _MOE, head_dim=16, shared_expert_intermediate_size=40, linear_key_head_dim=8, linear_value_head_dim=8,
        linear_num_key_heads=2, linear_num_value_heads=4,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    )),
    "glm4_moe": ("Glm4Moe", dict(_SIGMOID, head_dim=16)),
    "deepseek_v2": ("DeepseekV2", dict(_LATENT, topk_method="group_limited_greedy")),
    "deepseek_v3": ("DeepseekV3", _LATENT),
    "gpt_oss": ("GptOss", dict(_BASE, head_dim=16, num_local_experts=6, num_experts_per_tok=2, sliding_window=8)),
    "mixtral": ("Mixtral", dict(_BASE, num_local_experts=6, num_experts_per_tok=2)),
}  # fmt: skip

FAMILIES = tuple(_FAMILIES)
MOE_FAMILIES = (
    "mixtral", "granitemoe", "phimoe", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "glm4_moe", "deepseek_v2",
    "deepseek_v3", "gpt_oss",
)  # fmt: skip


def tiny_config(family: str, **overrides):
    name, settings = _FAMILIES[family]
    return getattr(transformers, f"{name}Config")(**{**settings, **overrides})


def tiny(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides) -> torch.nn.Module:
    """A random causal model of `family` in eval mode, seeded. `overrides` go to its config.

    Weights are larger than at initialisation, norms and biases (of routers too) not 1 and 0: every part matters.
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
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(0, 0.3)
    return model.to(dtype).eval().requires_grad_(False)


def tiny_multimodal(seed: int = 0) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A Gemma-3 with a vision tower around `tiny("gemma3")`'s weights, and that text model."""
    text = tiny("gemma3", seed=seed)
    vision = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    config = transformers.Gemma3Config(text_config=text.config.to_dict(), vision_config=vision, mm_tokens_per_image=4)
    model = transformers.Gemma3ForConditionalGeneration(config).eval().requires_grad_(False)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    return model, text


def token_ids(rows: int = 1, length: int = 12, seed: int = 0) -> torch.Tensor:
    """Seeded token ids [rows, length], none of them pad, bos or eos."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
