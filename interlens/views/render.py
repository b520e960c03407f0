"""From a view to token ids, with the place of every message.

Fitting a view to a template happens here: system messages fold into the first user message where a template knows no
system role, neighbours of one role merge where it wants strict alternation, tool results become labelled user text where
it has no tool role. What a participant's model generated itself is spliced in as token ids, never tokenised again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from ..interp.select import Layout
from ..message import Fed
from ..reasoning import Markers, split_reply
from .segments import Item, Tokens
from .template import Reply, Shape, Template, template_of
from .view import View, ViewMessage, shown


@dataclass
class _Slot:
    """One message as the template sees it."""

    role: str
    messages: list[ViewMessage] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A rendered view."""

    template: Template
    items: list[Item]
    tokens: Tokens
    layout: Layout

    @property
    def ids(self) -> tuple[int, ...]:
        return self.tokens.ids

    @cached_property
    def text(self) -> str:
        """The prompt as text; generated tokens are decoded."""
        decode = self.template.tokenizer.decode
        return "".join(decode(list(i.ids)) if i.kind == "tokens" else i.text for i in self.items)


def render(
    view: View, template: Template, *, generate: bool = True, thinking: bool | None = None, markers: Any = None
) -> Rendered:
    """Token ids, text and layout of a view. Raises TemplateError where the template cannot show it."""
    slots = _arrange(view, template, generate)
    shape = _shape(slots, view, template, generate, thinking)
    parts = template.skeleton(shape)
    items = _items(view, slots, shape, parts, template, marks=False)
    tokens = template.segments.tokens(items)
    return Rendered(template=template, items=items, tokens=tokens, layout=_layout(tokens, template, markers))


def message_token_spans(tokenizer: Any, view: View | Sequence[dict[str, str]]) -> list[tuple[int, int]]:
    """The tokens of each message of a view, markup included: half-open spans that tile the rendered sequence.

    `view`: what `conversation.view(...)` gave, or role/content dicts. An empty message whose template shows nothing of
    it has an empty span. No generation prompt is rendered.
    """
    return message_token_ids(tokenizer, view)[1]


def message_token_ids(
    tokenizer: Any, view: View | Sequence[dict[str, str]]
) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """The token ids that `message_token_spans` speaks of, and the spans."""
    if not isinstance(view, View):
        view = View(pov="", messages=tuple(ViewMessage(role=m["role"], content=m["content"]) for m in view))
    template = template_of(tokenizer)
    slots = _arrange(view, template, False)
    shape = _shape(slots, view, template, False, None)
    items = _items(view, slots, shape, template.skeleton(shape), template, marks=True)
    tokens = template.segments.tokens(items)
    starts = [0, *tokens.marks[1:]] if tokens.marks else []
    spans = list(zip(starts, [*starts[1:], len(tokens.ids)], strict=True))
    order = [
        id(m.original or m) for slot in slots for m in slot.messages
    ]  # slots may hold them in another order than the view
    place = {ref: span for ref, span in zip(order, spans, strict=True)}
    return tuple(tokens.ids), [place[id(m)] for m in view.messages]


# -- fitting a view to a template -------------------------------------------------------------------------------------
def _arrange(view: View, template: Template, generate: bool) -> list[_Slot]:
    system = [m for m in view.messages if m.role == "system"]
    if view.tools and not template.takes_tools:
        from ..tools import describe

        system.append(ViewMessage(role="system", content=describe(view.tools)))
    slots = [_Slot(m.role, [m]) for m in view.messages if m.role != "system"]
    if not template.takes_tool_role:
        slots = [_Slot("user", [_told(m) for m in s.messages]) if s.role == "tool" else s for s in slots]
    if not template.takes_any_order:
        slots = _alternate(slots)
    if system and not template.takes_system:
        if not slots or slots[0].role != "user":
            slots.insert(0, _Slot("user"))
        slots[0].messages[:0] = system
    elif system:
        slots.insert(0, _Slot("system", system))
    if not (template.takes_system_alone if slots else template.takes_nothing) and all(
        s.role == "system" for s in slots
    ):
        slots.append(_Slot("user", [ViewMessage(role="user", content="")]))
    return slots


def _alternate(slots: list[_Slot]) -> list[_Slot]:
    """Neighbours of one role become one; a user comes first."""
    merged: list[_Slot] = []
    for slot in slots:
        if merged and merged[-1].role == slot.role:
            merged[-1].messages.extend(slot.messages)
        else:
            merged.append(_Slot(slot.role, list(slot.messages)))
    if merged and merged[0].role != "user":
        merged.insert(0, _Slot("user", [ViewMessage(role="user", content="")]))
    return merged


def _told(message: ViewMessage) -> ViewMessage:
    """A tool result as user text."""
    return replace(message, role="user", original=message,
                   content=f"<tool_response>\n{message.content}\n</tool_response>")  # fmt: skip


def _shape(slots: list[_Slot], view: View, template: Template, generate: bool, thinking: bool | None) -> Shape:
    schemas = ""
    if view.tools and template.takes_tools:
        from ..tools import schemas_json

        schemas = schemas_json(view.tools)
    names = tuple(s.messages[0].author if s.role == "tool" else None for s in slots)
    return Shape(tuple(s.role for s in slots), generate, schemas, thinking, names)


# -- contents into the holes ------------------------------------------------------------------------------------------
def _items(
    view: View, slots: list[_Slot], shape: Shape, parts: list[str], template: Template, marks: bool
) -> list[Item]:
    """The stream of a view. `marks`: one before every message, else one where the branch begins (or none)."""
    items: list[Item] = []
    due = _branch_message(view, slots) if not marks else None
    cut_end = False  # the last slot brought its own end of turn
    for n, slot in enumerate(slots):
        before, own = parts[n], _own_tokens(slot, template)
        if cut_end:
            before = _without_end(before, template)
        edge = None
        if marks or (due is not None and slot.messages and slot.messages[0] is due):
            edge = _edge(parts, n, shape, template) - (len(parts[n]) - len(before))
        if own is not None and own[1]:
            before = _reply_head(before, template.reply(shape.thinking))
        if edge is None:
            items.append(Item("markup", before))
        else:
            edge = min(max(edge, 0), len(before))
            items += [Item("markup", before[:edge]), Item("mark"), Item("markup", before[edge:])]
        items += _slot_items(view, slot, n, shape, template, own, due, marks)
        cut_end = own is not None and slot.messages[-1].in_tools
    last = _without_end(parts[-1], template) if cut_end else parts[-1]
    if view.branch_start is not None and not marks and due is None and slots:
        edge = _edge(parts, len(slots), shape, template) - (len(parts[-1]) - len(last))
        edge = min(max(edge, 0), len(last))
        items += [Item("markup", last[:edge]), Item("mark"), Item("markup", last[edge:])]
    else:
        items.append(Item("markup", last))
    return [i for i in items if i.kind != "markup" or i.text]


def _slot_items(view, slot, n, shape, template, own, due, marks) -> list[Item]:
    items: list[Item] = []
    authors = {m.author for m in slot.messages if m.index is not None}
    for k, message in enumerate(slot.messages):
        if k:
            items.append(Item("markup", "\n\n"))
        if k and (marks or message is due):
            items.append(Item("mark"))
        if k == 0 and own is not None:
            items.append(Item("tokens", index=message.index, ids=own[0]))
        elif message.role == "assistant" and (spliced := _answer_tokens(message, template)) is not None:
            items.append(Item("tokens", index=message.index, ids=spliced))
        else:
            label = view.label(message)
            if not label and slot.role == "user" and len(authors) > 1 and message.index is not None:
                label = f"{message.author}: "
            text = shown(message)
            text = template.content(text, n, shape) if len(slot.messages) == 1 else text.strip()
            items += [Item("markup", label)] if label else []
            items.append(Item("content", text, message.index))
    return items


def _branch_message(view: View, slots: list[_Slot]) -> ViewMessage | None:
    """The first message after the trunk."""
    if view.branch_start is None:
        return None
    after = (m for s in slots for m in s.messages if m.index is not None and m.index >= view.branch_start)
    return next(after, None)


def _edge(parts: list[str], n: int, shape: Shape, template: Template) -> int:
    """Where, in the markup before slot n, the previous message ends and this one begins."""
    if n == 0:
        return 0
    try:
        alone = template.skeleton(replace(shape, roles=shape.roles[:n], names=shape.names[:n], generate=False))
        if alone[:n] == parts[:n] and parts[n].startswith(alone[n]):
            return len(alone[n])
    except ValueError:
        pass
    end = template.segments.end_of_first_special(parts[n])
    return end if n < len(shape.roles) or end < len(parts[n]) else len(parts[n])


# -- tokens a model generated itself ----------------------------------------------------------------------------------
def _fed(message: ViewMessage, template: Template) -> Fed | None:
    fed = message.fed
    if fed is None or not fed.generated or fed.template_hash not in ("", template.hash):
        return None
    return fed


def _own_tokens(slot: _Slot, template: Template) -> tuple[tuple[int, ...], bool] | None:
    """(ids, whether they continue the generation prompt itself) of the slot's first message; None: it has no tokens."""
    message = slot.messages[0] if slot.messages else None
    if message is None or slot.role != "assistant" or (fed := _fed(message, template)) is None:
        return None
    if message.in_tools:
        return fed.generated, True
    if message.keep_reasoning or not _reasons(fed, template):
        return _without_stop(fed.generated, template), True
    return _answer_tokens(message, template) or (), False


def _answer_tokens(message: ViewMessage, template: Template) -> tuple[int, ...] | None:
    """Its answer, or all of it where reasoning is kept, without the stop token; None: no recorded tokens."""
    fed = _fed(message, template)
    if fed is None:
        return None
    ids = _without_stop(fed.generated, template)
    if message.keep_reasoning or not _reasons(fed, template):
        return ids
    markers = _markers_of(fed, template)
    if markers is None:
        answer = tuple(i for i, phase in zip(ids, fed.phases, strict=False) if phase == "answer")
    else:
        answer = _split(ids, markers)[1]
    blank = template.markers.blank if template.markers else frozenset()
    start = next((n for n, i in enumerate(answer) if i not in blank), len(answer))
    return answer[start:]


_split = lru_cache(maxsize=4096)(split_reply)


def _markers_of(fed: Fed, template: Template) -> Markers | None:
    """The markers of a generation; of one that was read back, the family's."""
    if fed.layout is not None:
        return fed.layout.markers
    markers, first = template.markers, fed.phases[:1]
    if markers is None or first != ("reasoning",):
        return markers
    return replace(markers, opened=not any(fed.generated[: len(m)] == m for m in markers.open))


def _reasons(fed: Fed, template: Template) -> bool:
    """Whether something generated is not to be seen again: reasoning, or what looks like it in hindsight."""
    if "reasoning" in fed.phases:
        return True
    markers = _markers_of(fed, template)
    return markers is not None and bool(_split(fed.generated, markers)[0])


def _without_stop(ids: tuple[int, ...], template: Template) -> tuple[int, ...]:
    return ids[:-1] if ids and ids[-1] in template.special_ids else ids


def _reply_head(markup: str, reply: Reply) -> str:
    """`markup` up to where a reply is generated, so that generated tokens stand where they were generated."""
    if reply.head and reply.head in markup:
        return markup[: markup.rfind(reply.head) + len(reply.head)] + reply.prompt
    return markup.removesuffix(reply.history) + reply.prompt if reply.history or reply.prompt else markup


def _without_end(markup: str, template: Template) -> str:
    """`markup` without the end of turn that the tokens before it brought themselves."""
    end = template.tokenizer.decode(list(template.end_of_turn)) if template.end_of_turn else ""
    return markup.lstrip(" ").removeprefix(end) if end and markup.lstrip(" ").startswith(end) else markup


# -- the layout -------------------------------------------------------------------------------------------------------
def _layout(tokens: Tokens, template: Template, markers: Any) -> Layout:
    special: list[tuple[int, int]] = []
    spans: dict[int, tuple[int, int]] = {}
    end = 0
    for index, start, stop in tokens.contents:
        if start > end:
            special.append((end, start))
        inner = tokens.ids[start:stop]
        if not template.special_ids.isdisjoint(inner):
            special += [(start + n, start + n + 1) for n, i in enumerate(inner) if i in template.special_ids]
        if index is not None:
            spans[index] = (start, stop)
        end = max(end, stop)
    if end < len(tokens.ids):
        special.append((end, len(tokens.ids)))
    return Layout(
        message_spans=spans, special_spans=tuple(special), special_ids=template.special_ids, markers=markers,
        branch_start=tokens.marks[0] if tokens.marks else None,
    )  # fmt: skip
