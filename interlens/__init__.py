"""Models that talk to each other, watched and changed from inside. Importing this package imports no torch."""

import importlib

_HOMES = {
    "Conversation": "conversation",
    "run": "rollout",
    "RolloutReport": "rollout",
    "RolloutResult": "rollout",
    "Tool": "tools",
    "ToolRegistry": "tools",
    "Participant": "participants",
    "ModelParticipant": "participants",
    "AutoModelParticipant": "participants",
    "ScriptedParticipant": "participants",
    "APIParticipant": "participants",
    "HumanParticipant": "participants",
    "ContextItem": "policies",
    "dataset_field": "policies",
    "TurnStopCondition": "policies",
    "TokenStopCondition": "policies",
    "ElapsedTimeStopCondition": "policies",
    "StopStringCondition": "policies",
    "AnyStopCondition": "policies",
    "TokenBudget": "policies",
    "ErrorPolicy": "policies",
    "DropOldestPolicy": "policies",
    "SlidingWindowPolicy": "policies",
    "SummarizePolicy": "policies",
    "RoundRobinPolicy": "policies",
    "DirectPipingPolicy": "policies",
    "MessagingPolicy": "policies",
    "MessageHook": "policies",
    "approve": "policies",
    "deny": "policies",
    "edit": "policies",
    "ReasoningVisibility": "policies",
    "Message": "message",
    "Transcript": "transcript",
    "SteeringSpec": "interp.steering",
    "Patch": "interp.patching",
    "Select": "interp.select",
    "CaptureSpec": "interp.activation_cache",
    "ActivationCache": "interp.activation_cache",
    "ActivationRecord": "interp.activation_cache",
    "token_logprobs": "interp.logprobs",
    "decoder_layers": "interp.locate",
    "RouterSteeringSpec": "interp.routing",
    "forward_with_grad": "interp.gradients.forward",
    "GradCaptureSpec": "interp.gradients.forward",
    "GradForwardOutput": "interp.gradients.forward",
    "continuation_logprob": "interp.gradients.continuation",
    "soft_embed": "interp.gradients.soft",
    "gumbel_softmax_tokens": "interp.gradients.soft",
    "LinearBridge": "interp.gradients.soft",
    "VirtualTokenInjector": "interp.gradients.injector",
    "UnsupportedIntervention": "errors",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module 'interlens' has no attribute {name!r}")


def __dir__():
    return __all__
