"""A view's contents put into the holes of its skeleton: the stream of items that `Segments` turns into tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .arrange import Slot
from .segments import Item
from .splice import answer_tokens, from_end, own_tokens, reply_head, without_end
from .template import Shape, Template, TemplateError
from .view import View, ViewMessage, shown

Memo = dict[int, tuple[ViewMessage, str, list[Item], bool]]
"""Of an earlier view: slot -> (its message, the markup before it, its items, whether they end the turn)."""


@dataclass(kw_only=True)
class Stream:
    """One view on its way to tokens. `marks`: one before every message; else one where the branch begins."""

    view: View
    slots: list[Slot]
    shape: Shape
    template: Template
    marks: bool = False
    memo: Memo = field(default_factory=dict)
    """What is found here is not made again; what is made is put here."""

    def items(self) -> list[Item]:
        """The whole stream."""
        self.parts = self.template.skeleton(self.shape)
        self.due = None if self.marks else self._branch_message()
        items: list[Item] = []
        brought_end = False  # the slot before brought its own end of turn
        parts, memo, due = self.parts, self.memo, self.due
        for n, slot in enumerate(self.slots):
            known = memo.get(n) if not (self.marks or brought_end) else None
            if (
                known is None or known[0] is not slot.messages[0] or known[1] != parts[n]
                or known[0] is due or len(slot.messages) > 1
            ):  # fmt: skip
                lasting = not brought_end and self._lasts(slot)
                made, brought_end = self._slot(n, slot, brought_end)
                if lasting:
                    memo[n] = (slot.messages[0], parts[n], made, brought_end)
            else:
                made, brought_end = known[2], known[3]
            items += made
        last = without_end(self.parts[-1], self.template) if brought_end else self.parts[-1]
        begins = self.view.branch_start is not None and self.due is None and self.slots and not self.marks
        items += self._markup(last, len(self.slots), len(self.parts[-1]) - len(last), bool(begins))
        return items

    def _lasts(self, slot: Slot) -> bool:
        """Whether the items of a slot depend on nothing but its message and the markup before it."""
        first = slot.messages[0] if len(slot.messages) == 1 else None
        if first is None or first is self.due or self.marks or slot.role == "tool":
            return False
        return own_tokens(first, self.template) is not None or self.template.leaves(first.role, shown(first))

    def _slot(self, n: int, slot: Slot, brought_end: bool) -> tuple[list[Item], bool]:
        """(items of a slot with the markup before it, whether they bring their own end of turn)."""
        before, template = self.parts[n], self.template
        own = own_tokens(slot.messages[0], template) if slot.messages else None
        if n and self.shape.called(n - 1):
            before = from_end(before, template)
        if brought_end:
            before = without_end(before, template)
        gone = len(self.parts[n]) - len(before)
        if self.shape.called(n):
            before = self._prompt(n)
        elif own is not None and own[1]:
            before = reply_head(before, template.reply(self.shape.thinking))
        begins = self.marks or (self.due is not None and bool(slot.messages) and slot.messages[0] is self.due)
        items = self._markup(before, n, gone, begins)
        authors = {m.author for m in slot.messages if m.index is not None}
        for k, message in enumerate(slot.messages):
            if k:
                items.append(Item("markup", "\n\n"))
                if self.marks or message is self.due:
                    items.append(Item("mark"))
            ids = own[0] if k == 0 and own is not None else answer_tokens(message, template)
            if ids is not None:
                items.append(Item("tokens", index=message.index, ids=ids))
                continue
            label = self.view.label(message)
            if not label and slot.role == "user" and len(authors) > 1 and message.index is not None:
                label = f"{message.author}: "
            text = shown(message)
            text = template.content(text, n, self.shape) if len(slot.messages) == 1 else text.strip()
            if label and template.segments.spells_special(label):
                raise TemplateError(
                    f"{message.author!r} would be markup of this chat template; give the speaker another name"
                )
            items += [Item("markup", label)] if label else []
            items.append(Item("content", text, message.index))
        last = items[-1]
        return items, slot.messages[-1].in_tools and bool(last.ids) and last.ids[-1] in template.special_ids

    def _prompt(self, n: int) -> str:
        """The markup before slot n as it was when slot n was generated."""
        shape = replace(self.shape, roles=self.shape.roles[:n], names=self.shape.names[:n], generate=True)
        return self.template.skeleton(shape)[-1]

    def _markup(self, text: str, n: int, gone: int, begins: bool) -> list[Item]:
        """Markup before slot n, whose first `gone` characters were left out; with a mark where the slot begins."""
        if not begins:
            return [Item("markup", text)] if text else []
        edge = min(max(self._edge(n) - gone, 0), len(text))
        items = [Item("markup", text[:edge]), Item("mark"), Item("markup", text[edge:])]
        return [i for i in items if i.kind == "mark" or i.text]

    def _branch_message(self) -> ViewMessage | None:
        """The first message after the trunk."""
        start = self.view.branch_start
        if start is None:
            return None
        after = (m for s in self.slots for m in s.messages if m.index is not None and m.index >= start)
        return next(after, None)

    def _edge(self, n: int) -> int:
        """Where, in the markup before slot n, the previous message ends and this one begins."""
        if n == 0:
            return 0
        shape, parts = self.shape, self.parts
        try:
            alone = replace(shape, roles=shape.roles[:n], names=shape.names[:n], generate=False)
            skeleton = self.template.skeleton(alone)
        except TemplateError:
            return self.template.segments.end_of_first_special(parts[n])
        if skeleton[:n] == parts[:n] and parts[n].startswith(skeleton[n]):
            return len(skeleton[n])
        return self.template.segments.end_of_first_special(parts[n])
