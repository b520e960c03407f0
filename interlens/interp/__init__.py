"""Sites, capture, interventions and what is computed from them. Names load lazily; importing this imports no torch."""

import importlib

_HOMES = {
    "activation_cache": (
        "ANY", "ActivationCache", "ActivationRecord", "CaptureSpec", "OffloadLocation", "Phase", "offload_to_cpu",
    ),
    "attach": ("registered",),
    "attention": ("AttentionPattern", "attention_patterns"),
    "capture": ("CapturedSite", "capture_activations"),
    "control_vectors": ("export_control_vector",),
    "expert_load": ("RoutingStats", "js_divergence", "kl_divergence", "routing_stats", "topk_expert_overlap"),
    "gradients.continuation": ("continuation_logprob",),
    "gradients.forward": ("GradCaptureSpec", "GradForwardOutput", "forward_with_grad"),
    "gradients.injector": ("VirtualTokenInjector",),
    "gradients.soft": ("LinearBridge", "gumbel_softmax_tokens", "soft_embed"),
    "hooks": ("attached",),
    "intervention": ("Intervention",),
    "lens": ("logit_lens", "unembed"),
    "locate": (
        "decoder_layers", "describe", "num_layers", "require_site", "resolve_layers", "site_width", "sites_of", "verify",
    ),
    "logprobs": ("token_logprobs",),
    "patching": ("AlignedPatch", "Patch"),
    "pooling": ("group_pool", "span_pool"),
    "registration": ("Registration", "register"),
    "routing": (
        "RouterSteeringSpec", "RoutingCapture", "capture_router_logits", "moe_layer_indices", "moe_num_experts",
        "moe_topk", "route", "routing_of",
    ),
    "select": ("Layout", "Select", "TokenSequence"),
    "sites": ("Site", "canonical_site"),
    "steering": ("SteeringSpec",),
    "..studies.pooled_residuals": ("span_pooled_residuals",),
    "..views.render": ("message_token_ids", "message_token_spans"),
}  # fmt: skip
_NAMES = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_NAMES)


def __getattr__(name: str):
    if name in _NAMES:
        return getattr(
            importlib.import_module(_NAMES[name] if _NAMES[name][0] == "." else f".{_NAMES[name]}", __name__), name
        )
    raise AttributeError(f"module 'interlens.interp' has no attribute {name!r}")


def __dir__():
    return __all__
