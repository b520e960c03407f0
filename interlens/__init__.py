"""Models that talk to each other, watched and changed from inside. Importing this package imports no torch."""

import importlib

_HOMES = {
    "Conversation": "conversation",
    "Message": "message",
    "Transcript": "transcript",
    "SteeringSpec": "interp.steering",
    "Patch": "interp.patching",
    "Select": "interp.select",
    "CaptureSpec": "interp.activation_cache",
    "ActivationCache": "interp.activation_cache",
    "ActivationRecord": "interp.activation_cache",
    "token_logprobs": "interp.logprobs",
    "decoder_layers": "interp.sites",
    "UnsupportedIntervention": "errors",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module 'interlens' has no attribute {name!r}")


def __dir__():
    return __all__
