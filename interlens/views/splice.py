"""What a participant's model generated itself, as it goes back into a later prompt: token by token."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ..message import Fed
from ..reasoning import Markers, split_reply
from .template import Reply, Template
from .view import ViewMessage


def _fed(message: ViewMessage, template: Template) -> Fed | None:
    fed = message.fed
    if fed is None or not fed.generated or fed.template_hash not in ("", template.hash):
        return None
    return fed


def own_tokens(message: ViewMessage, template: Template) -> tuple[tuple[int, ...], bool] | None:
    """(ids, whether they continue the generation prompt itself) of a message; None: no recorded tokens."""
    if message.role != "assistant" or (fed := _fed(message, template)) is None:
        return None
    if message.in_tools:
        return fed.generated, True
    if message.keep_reasoning or not _reasons(fed, template):
        return _without_stop(fed.generated, template), True
    return answer_tokens(message, template) or (), False


def answer_tokens(message: ViewMessage, template: Template) -> tuple[int, ...] | None:
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


def reply_head(markup: str, reply: Reply) -> str:
    """`markup` up to where a reply is generated, so that generated tokens stand where they were generated."""
    if reply.head and reply.head in markup:
        return markup[: markup.rfind(reply.head) + len(reply.head)] + reply.prompt
    return markup.removesuffix(reply.history) + reply.prompt if reply.history or reply.prompt else markup


def without_end(markup: str, template: Template) -> str:
    """`markup` without the end of turn that the tokens before it brought themselves."""
    end = _end(template)
    return markup.lstrip(" ").removeprefix(end) if end and markup.lstrip(" ").startswith(end) else markup


def from_end(markup: str, template: Template) -> str:
    """`markup` from its first end of turn on: what a template writes of calls is in the tokens before it already."""
    return markup[max(markup.find(_end(template)), 0) :]


def _end(template: Template) -> str:
    return template.tokenizer.decode(list(template.end_of_turn)) if template.end_of_turn else ""
