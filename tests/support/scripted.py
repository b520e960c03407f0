"""An engine without a model: it answers requests with the texts of a function, one token of every live row a step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from interlens.engine.request import Reply, Request
from interlens.interp.select import TokenSequence
from interlens.participants.model import ModelParticipant
from interlens.participants.weights import Weights


@dataclass
class Ticket:
    request: Request
    reply: Reply | None = None
    left: list[int] | None = None


class ScriptedEngine:
    """`answer(request, tokenizer) -> str` is what the model would say; the stop token is added when there is room."""

    def __init__(self, tokenizer, answer: Callable[[Request, object], str]):
        self.tokenizer, self.answer = tokenizer, answer
        self.live: list[tuple[Ticket, TokenSequence]] = []
        self.requests: list[Request] = []

    def submit(self, request: Request) -> Ticket:
        self.requests.append(request)
        ticket = Ticket(request)
        try:
            text = self.answer(request, self.tokenizer)
            if isinstance(text, BaseException):
                raise text
        except Exception as error:
            ticket.reply = Reply(finish_reason="error", error=error)
            return ticket
        stop = self.tokenizer.eos_token_id
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] + [stop]
        ticket.left = ids[: request.sampling.max_new_tokens]
        self.live.append((ticket, TokenSequence(list(request.tokens), request.layout)))
        return ticket

    def step(self) -> bool:
        for ticket, sequence in self.live:
            sequence.append(ticket.left.pop(0))
            if not ticket.left:
                ids = tuple(sequence.generated)
                reason = "stop" if ids[-1] in ticket.request.sampling.stop_ids else "length"
                edits = tuple(len(sequence) for _ in ticket.request.interventions)
                ticket.reply = Reply(
                    tokens=ids, finish_reason=reason, phases=tuple(sequence.phases), tokens_modified=edits,
                )  # fmt: skip
        busy = bool(self.live)
        self.live = [(t, s) for t, s in self.live if t.reply is None]
        return busy

    def cancel(self, ticket: Ticket) -> None:
        self.live = [(t, s) for t, s in self.live if t is not ticket]


def speaker(name: str, tokenizer, answer=None, **options) -> ModelParticipant:
    """A ModelParticipant on a scripted engine. `answer`: a text, several, or a function of (request, tokenizer)."""
    return ModelParticipant(name, Weights(engine=engine(tokenizer, answer), tokenizer=tokenizer), **options)


def engine(tokenizer, answer=None) -> ScriptedEngine:
    return ScriptedEngine(tokenizer, answer if callable(answer) else echo_key if answer is None else texts(answer))


def texts(given):
    lines = [given] if isinstance(given, str) else list(given)
    count = iter(range(10**9))
    return lambda request, tokenizer: lines[next(count) % len(lines)]


def echo_key(request: Request, tokenizer) -> str:
    """A text that is a function of the request's key and prompt alone, as a real engine's is."""
    digest = hashlib.blake2b(repr((request.key, request.tokens)).encode(), digest_size=4)
    return f"I say {int(digest.hexdigest(), 16) % 9973} now."
