"""Sites, capture, interventions and what is computed from them. Names load lazily; importing this imports no torch."""

import importlib

_HOMES = {
    "activation_cache": (
        "ANY", "ActivationCache", "ActivationRecord", "CaptureSpec", "OffloadLocation", "Phase", "offload_to_cpu",
    ),
    "capture": ("CapturedSite", "capture_activations"),
    "hooks": ("attached", "registered"),
    "intervention": ("Intervention",),
    "logprobs": ("token_logprobs",),
    "patching": ("Patch",),
    "pooling": ("group_pool", "span_pool"),
    "registration": ("Registration", "register"),
    "select": ("Layout", "Select", "TokenSequence"),
    "sites": (
        "Site", "canonical_site", "decoder_layers", "describe", "num_layers", "require_site", "resolve_layers",
        "site_width", "sites_of",
    ),
    "steering": ("SteeringSpec",),
}  # fmt: skip
_NAMES = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_NAMES)


def __getattr__(name: str):
    if name in _NAMES:
        return getattr(importlib.import_module(f".{_NAMES[name]}", __name__), name)
    raise AttributeError(f"module 'interlens.interp' has no attribute {name!r}")


def __dir__():
    return [*__all__, *_HOMES]
