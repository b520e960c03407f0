"""Who may see reasoning."""

from enum import StrEnum


class ReasoningVisibility(StrEnum):
    """Who sees the reasoning in a reply. The plain strings will do as well."""

    STRIP = "strip"
    """Nobody: not even its author in later turns."""
    SELF_RETAIN = "self_retain"
    """Its author only."""
    SHARED = "shared"
    """Everybody."""
