"""From a view to token ids, with the place of every message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..interp.select import Layout
from .arrange import arrange, shape_of
from .segments import Tokens
from .stream import Memo, Stream
from .template import Template, template_of
from .view import View, ViewMessage


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A rendered view."""

    view: View
    template: Template
    tokens: Tokens
    layout: Layout
    thinking: bool | None = None
    memo: Memo = field(default_factory=dict)

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """The token ids that the model is fed."""
        return self.tokens.ids

    @cached_property
    def text(self) -> str:
        """The prompt as text; generated tokens are decoded."""
        decode = self.template.tokenizer.decode
        return "".join(decode(list(i.ids)) if i.kind == "tokens" else i.text for i in self.tokens.items)


def render(
    view: View, template: Template, *, generate: bool = True, thinking: bool | None = None, markers: Any = None,
    last: Rendered | None = None,
) -> Rendered:  # fmt: skip
    """Token ids, text and layout of a view. Raises TemplateError where the template cannot show it.

    last: an earlier view of the same reader and template; what begins alike is not gone through again.
    """
    slots = arrange(view, template)
    shape = shape_of(slots, view, template, generate, thinking)
    memo = last.memo if last is not None else {}
    items = Stream(view=view, slots=slots, shape=shape, template=template, memo=memo).items()
    tokens = template.segments.tokens(items, last.tokens if last is not None else None)
    spans: dict[Any, tuple[int, int]] = dict(tokens.contents)
    spans.pop(None, None)
    layout = Layout(
        message_spans=spans,
        special_spans=tuple(tokens.special), special_ids=template.special_ids, markers=markers,
        branch_start=tokens.marks[0] if tokens.marks else None,
    )  # fmt: skip
    return Rendered(view=view, template=template, tokens=tokens, layout=layout, thinking=thinking, memo=memo)


def message_token_spans(tokenizer: Any, view: View | Sequence[dict[str, str]]) -> list[tuple[int, int]]:
    """The tokens of each message of a view, markup included: half-open spans that tile the rendered sequence.

    They are spans of the ids that `message_token_ids` gives, which are those that a model is fed here. These are not
    `tokenizer.apply_chat_template`'s where a content spells out a special token ("<|im_end|>"): here it stays text.

    `view`: what `conversation.view(...)` gave, or role/content dicts. An empty message whose template shows nothing of
    it has an empty span. No generation prompt is rendered.
    """
    return message_token_ids(tokenizer, view)[1]


def message_token_ids(
    tokenizer: Any, view: View | Sequence[dict[str, str]]
) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """(the token ids that `message_token_spans` speaks of, the spans): run a model on these ids."""
    if not isinstance(view, View):
        view = View(pov="", messages=tuple(ViewMessage(role=m["role"], content=m["content"]) for m in view))
    template = template_of(tokenizer)
    slots = arrange(view, template)
    shape = shape_of(slots, view, template, False, None)
    tokens = template.segments.tokens(
        Stream(view=view, slots=slots, shape=shape, template=template, marks=True).items()
    )  # fmt: skip
    # slots may hold messages in another order than the view, and some of their own, which go to the one before, if any
    order = [id(m.original or m) for slot in slots for m in slot.messages]
    known = {id(m) for m in view.messages}
    starts = [(ref, start) for ref, start in zip(order, tokens.marks, strict=True) if ref in known]
    place, stop = {}, tokens.length
    for n, (ref, start) in reversed(list(enumerate(starts))):
        place[ref] = (start if n else 0, stop)
        stop = start
    return tokens.ids, [place[id(m)] for m in view.messages]
