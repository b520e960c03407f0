"""When a run stops, who speaks next, what fits, what may be said, what is filled in."""

from ..templating import ContextItem, dataset_field
from ..visibility import ReasoningVisibility
from .communication import CommunicationPolicy, DirectPipingPolicy, MessagingPolicy, RoundRobinPolicy
from .context import ContextPolicy, DropOldestPolicy, ErrorPolicy, SlidingWindowPolicy, SummarizePolicy
from .hooks import MessageHook, Verdict, approve, deny, edit
from .stopping import (
    AnyStopCondition,
    ElapsedTimeStopCondition,
    StopCondition,
    StopStringCondition,
    TokenBudget,
    TokenStopCondition,
    TurnStopCondition,
)

__all__ = [
    "AnyStopCondition", "CommunicationPolicy", "ContextItem", "ContextPolicy", "DirectPipingPolicy",
    "DropOldestPolicy", "ElapsedTimeStopCondition", "ErrorPolicy", "MessageHook", "MessagingPolicy",
    "ReasoningVisibility", "RoundRobinPolicy", "SlidingWindowPolicy", "StopCondition", "StopStringCondition",
    "SummarizePolicy", "TokenBudget", "TokenStopCondition", "TurnStopCondition", "Verdict", "approve",
    "dataset_field", "deny", "edit",
]  # fmt: skip
