"""One generation of a local model, and the message it becomes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..capturing import as_tuple
from ..message import Fed, Message, plain
from ..reasoning import phases_of, reasoning_text, split_reply
from ..turns import TurnRequest

if TYPE_CHECKING:
    from .model import ModelParticipant


@dataclass(kw_only=True)
class Generation:
    """One generation, and what it becomes."""

    participant: ModelParticipant
    request: TurnRequest
    asked: Any
    reply: Any
    template: Any

    @cached_property
    def phases(self) -> tuple[str, ...]:
        return tuple(self.reply.phases) or phases_of(self.reply.tokens, self.asked.layout.markers)

    @cached_property
    def fed(self) -> Fed:
        return Fed(
            prompt=self.asked.tokens, generated=tuple(self.reply.tokens), phases=self.phases, layout=self.asked.layout,
            template_hash=self.template.hash,
        )  # fmt: skip

    @cached_property
    def raw(self) -> str:
        return self.participant.tokenizer.decode(list(self.reply.tokens), skip_special_tokens=False)

    @cached_property
    def halves(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        tokens = tuple(self.reply.tokens)
        if tokens and tokens[-1] in self.asked.sampling.stop_ids:
            tokens = tokens[:-1]
        return split_reply(tokens, self.asked.layout.markers)

    def rest(self, family: Any) -> tuple[str, list]:
        """(content, calls) of the reply."""
        decode = self.participant.tokenizer.decode
        content = decode(list(self.halves[1]), skip_special_tokens=True).strip()
        if family is None:
            return content, []
        text = self.raw if family.in_reasoning else decode(list(self.halves[1]), skip_special_tokens=False)
        left, calls = family.parse(text)
        if not calls:
            return content, []
        if family.in_reasoning:
            return "", calls
        for token in self.participant.tokenizer.all_special_tokens:
            left = left.replace(token, "")
        return left.strip(), calls

    def as_view(self, results: list[dict]) -> list:
        """This generation and the results of its calls, as the next generation sees them."""
        from ..views.view import ViewMessage

        own = ViewMessage(role="assistant", content=self.raw, author=self.participant.name, fed=self.fed, in_tools=True)
        return [own, *(ViewMessage(role="tool", content=r["result"], author=r["name"]) for r in results)]

    def message(self, content: str, trail: list, finish_reason: str) -> Message:
        sampling, reply = self.asked.sampling, self.reply
        metadata: dict[str, Any] = {
            "raw_completion": self.raw,
            "n_tokens": len(reply.tokens),
            "n_prompt_tokens": len(self.asked.tokens),
            "finish_reason": finish_reason,
            "seed": self.request.key[0],
            "sampling": {
                "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
                "max_new_tokens": sampling.max_new_tokens, "stop_ids": list(sampling.stop_ids),
            },
        }  # fmt: skip
        reasoning = reasoning_text(self.participant.tokenizer, self.halves[0])
        if reasoning:
            metadata["reasoning"] = reasoning
        metadata |= self._interventions()
        for name, values in (reply.logprobs or {}).items():
            metadata[name] = [v if math.isfinite(v) else None for v in map(float, values)]
        if trail:
            metadata["tool_trail"] = trail
        return Message(self.participant.name, content, metadata, fed=self.fed, records=tuple(reply.records))

    def _interventions(self) -> dict[str, Any]:
        """The `patch` and `steering` entries: a dict for one spec, a list for several."""
        patches = len(as_tuple(self.request.options.patch))
        counts = [*self.reply.tokens_modified, *[0] * len(self.asked.interventions)]
        told = [
            {**plain(spec.summary()), "fingerprint": spec.fingerprint, "tokens_modified": int(n)}
            for spec, n in zip(self.asked.interventions, counts, strict=False)
        ]
        parts = {"patch": told[:patches], "steering": told[patches:]}
        return {k: v[0] if len(v) == 1 else v for k, v in parts.items() if v}
