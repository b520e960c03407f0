"""Fitting a view to what a template can show.

System messages fold into the first user message where a template knows no system role, neighbours of one role merge
where it wants strict alternation, and tool results become labelled user text where it has no tool role, with or without
calls that it is told of.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..tools import describe, schemas_json
from .template import Shape, Template, today
from .view import View, ViewMessage


@dataclass(slots=True)
class Slot:
    """One message as the template sees it, made of one or more of the view's."""

    role: str
    messages: list[ViewMessage] = field(default_factory=list)


def arrange(view: View, template: Template) -> list[Slot]:
    """The slots of a view, in the order the template gets them."""
    system = [m for m in view.messages if m.role == "system"]
    if view.tools and not template.takes_tools:
        system.append(ViewMessage(role="system", content=describe(view.tools)))
    slots = [Slot(m.role, [m]) for m in view.messages if m.role != "system"]
    if not (template.takes_tool_role or template.takes_tool_calls):
        slots = [Slot("user", [_told(m) for m in s.messages]) if s.role == "tool" else s for s in slots]
    if not template.takes_any_order:
        slots = _alternate(slots, template.takes_tool_calls)
    if system and not template.takes_system:
        if not slots or slots[0].role != "user":
            slots.insert(0, Slot("user"))
        slots[0].messages[:0] = system
    elif system:
        slots.insert(0, Slot("system", system))
    if not (template.takes_system_alone if slots else template.takes_nothing) and all(
        s.role == "system" for s in slots
    ):
        slots.append(Slot("user", [ViewMessage(role="user", content="")]))
    return slots


def _alternate(slots: list[Slot], calls: bool) -> list[Slot]:
    """Neighbours of one role become one, but for tool results and, where the template is told of them, calls; a user
    comes first."""
    merged: list[Slot] = []
    for slot in slots:
        apart = slot.role == "tool" or (calls and slot.messages[0].in_tools)
        if merged and merged[-1].role == slot.role and not apart:
            merged[-1].messages.extend(slot.messages)
        else:
            merged.append(Slot(slot.role, list(slot.messages)))
    if merged and merged[0].role != "user":
        merged.insert(0, Slot("user", [ViewMessage(role="user", content="")]))
    return merged


def _told(message: ViewMessage) -> ViewMessage:
    """A tool result as user text."""
    return replace(message, role="user", original=message,
                   content=f"<tool_response>\n{message.content}\n</tool_response>")  # fmt: skip


def shape_of(slots: list[Slot], view: View, template: Template, generate: bool, thinking: bool | None) -> Shape:
    """What the skeleton of these slots depends on."""
    schemas = ""
    if view.tools and template.takes_tools:
        schemas = schemas_json(view.tools)
    roles = tuple([s.role for s in slots])
    names = tuple([s.messages[0].author if s.role == "tool" else None for s in slots]) if "tool" in roles else ()
    structured = bool(names) and template.takes_tool_calls
    return Shape(roles, generate, schemas, thinking, names, structured, day_of(view) if template.dated else "")


def day_of(view: View) -> str:
    """The day that a view's prompt shows, where its template shows one."""
    return view.date or today()
