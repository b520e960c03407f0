"""Local models as participants."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..calls import family_of
from ..engine.forward import UNLIMITED, context_limit
from ..engine.request import Reply, Request, Sampling
from ..errors import CannotLoad
from ..interp.activation_cache import as_tuple
from ..interp.locate import num_layers
from ..interp.patching import bound
from ..interp.sites import find_family
from ..message import Fed, Message, plain
from ..preview import skeleton
from ..reasoning import Markers, check_known, phases_of, reasoning_text, split_reply
from ..sources import kind
from ..templating import ContextItem
from ..tools import ToolRegistry, as_tools, entry
from ..views.arrange import day_of
from ..views.render import Rendered, render
from ..views.template import Template, template_of
from ..views.view import View, ViewMessage
from ..work import Ask, Generate, Steps, TurnOptions, TurnRequest
from .base import Participant
from .options import check_names, check_sampling
from .weights import Weights


class ModelParticipant(Participant):
    """A local model. Build with `AutoModelParticipant`; settings are plain attributes and may be changed.

    temperature (0: greedy), top_p, top_k, max_new_tokens: sampling. seed: None takes the conversation's.
    thinking: "auto" (the template decides), True or False (its `enable_thinking`), or a pair of texts (opening,
        closing) for a model whose markers are not known from its template.
    tools: functions or `Tool`s; at most `max_tool_iters` rounds of calls a turn.
    steering: in force in every turn that does not bring its own.
    adapter: a PEFT adapter folder, or the name of one that is attached to the model.
    """

    capturable = True
    has_prompt = True

    def __init__(
        self, name: str, weights: Weights, *, temperature: float = 0.8, top_p: float | None = 0.95,
        top_k: int | None = None, max_new_tokens: int = 512, seed: int | None = None,
        thinking: bool | str | tuple[str, str] = "auto", tools: Any = (), max_tool_iters: int = 4, steering: Any = None,
        adapter: str | None = None, system_prompt: Any = None, private_context: Iterable[ContextItem] = (),
    ):  # fmt: skip
        super().__init__(name, system_prompt=system_prompt, private_context=private_context, seed=seed)
        if isinstance(thinking, (list, tuple)):
            thinking = (str(thinking[0]), str(thinking[1]))
        elif thinking not in ("auto", True, False):
            raise ValueError(f"thinking is 'auto', True, False or a pair of marker texts, not {thinking!r}")
        check_sampling(name, temperature=temperature, top_p=top_p, top_k=top_k, max_new_tokens=max_new_tokens)
        self.weights = weights
        self.temperature, self.top_p, self.top_k = temperature, top_p, top_k
        self.max_new_tokens = max_new_tokens
        self.thinking = thinking
        self.tools = as_tools(tools)
        self.max_tool_iters = max_tool_iters
        self.steering = steering
        self.adapter = adapter
        self._rendered: Rendered | None = None  # the last view, so that the next one only goes through what is new

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rendered": None}

    # -- what it runs on --------------------------------------------------------------------------------------------
    @property
    def model(self) -> Any:
        """The loaded model, with its adapter attached."""
        return self.weights.get(self.adapter).model

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.weights.get(self.adapter).tokenizer

    @property
    def engine(self) -> Any:
        """The engine of its model, shared by everybody who uses that model."""
        return self.weights.engine(self.adapter)

    @property
    def template(self):
        """The chat template, with what is known of it."""
        return template_of(self.tokenizer)

    @property
    def context_limit(self) -> int | None:  # ty: ignore[incompatible-property-override]
        """Tokens the model can attend to; None if its configuration does not say."""
        config = getattr(self.model, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        limit, _ = context_limit(text)
        return limit if limit < UNLIMITED else None

    @property
    def num_layers(self) -> int | None:
        """Decoder layers."""
        return None if self.model is None else num_layers(self.model)

    def outline(self) -> Any:
        """The model if it is loaded, else its architecture without weights; None where neither is known yet."""
        if self.weights.is_loaded:
            return self.model
        try:
            found = skeleton(self.weights.source or "", self.weights.options.get("revision"))
        except CannotLoad:
            return None
        return found if find_family(found) else None

    def count_tokens(self, view: View) -> int:
        """Prompt tokens of a view."""
        return self.render(view).tokens.length

    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a reply: the model's and the tokenizer's end of text, and the template's end of turn."""
        config = getattr(self.model, "generation_config", None)
        ends = [getattr(config, "eos_token_id", None), self.tokenizer.eos_token_id]
        ids = [i for end in ends if end is not None for i in (end if isinstance(end, (list, tuple)) else [end])]
        known = self.tokenizer.get_added_vocab()
        ids += [known[text] for text in ("<|call|>", "<|return|>", "<|eom_id|>", "<|tool_response>") if text in known]
        return tuple(sorted({*ids, *self.template.end_of_turn}))

    def reply_ids(self, text: str) -> tuple[int, ...]:
        """The tokens of a reply with this text, its end of turn included: what teacher forcing feeds."""
        return (*self.tokenizer(text, add_special_tokens=False)["input_ids"], *self.template.end_of_turn)

    @property
    def _thinking_flag(self) -> bool | None:
        return self.thinking if isinstance(self.thinking, bool) else None

    def markers(self) -> Markers | None:
        """How its replies open and close reasoning."""
        texts = self.thinking if isinstance(self.thinking, tuple) else None
        return self.template.reply_markers(self._thinking_flag, texts)

    def render(self, view: View, generate: bool = True) -> Rendered:
        """The view as this model is fed it (a `views.Rendered`)."""
        last, template, markers = self._rendered, self.template, self.markers()
        if last is not None and (last.template is not template or last.thinking != self._thinking_flag):
            last = None
        if last is None or last.view is not view or last.layout.markers is not markers or not generate:
            last = render(view, template, generate=generate, thinking=self._thinking_flag, markers=markers, last=last)
            if generate:
                self._rendered = last
        return last

    def clone(self) -> ModelParticipant:
        """A copy for another conversation: weights are shared, settings are not."""
        other = copy.copy(self)
        other._rendered = None
        other.private_context = tuple(self.private_context)
        other.steering = list(self.steering) if isinstance(self.steering, list) else self.steering
        return other

    def needs(self) -> str:
        """The model and the adapter, by name."""
        adapter = f" with adapter {self.adapter!r}" if self.adapter else ""
        return f"model {self.weights.source or '(an unnamed loaded model)'!r}{adapter}"

    # -- a turn -----------------------------------------------------------------------------------------------------
    def turn(self, view: View, request: TurnRequest) -> Steps:
        """Generate, run the tools that the reply calls, and generate again, at most `max_tool_iters` times."""
        if self.thinking is not False:
            check_known(self.name, self.template.source, self.markers())
        registry, trail, spent = ToolRegistry(view.tools), [], 0
        family = family_of(self.template.source, self.template.takes_tools) if view.tools else None
        for round_ in range(self.max_tool_iters + 1 if view.tools else 1):
            made = yield from self._generate(view, request, round_)
            text, calls = made.rest(family if request.options.forced is None else None, registry)
            spent += len(made.reply.tokens)
            if not calls or round_ == self.max_tool_iters or request.tokens_left == spent:
                break
            results = []
            for call in calls:
                result, failed = yield Ask(participant=self, call=lambda call=call: registry.run(call))
                results.append(entry(call, result, failed))
            trail.append({"raw_completion": made.raw, "n_tokens": len(made.reply.tokens), "calls": results})
            request, view = yield from request.after(spent, view.with_messages([*view, *made.as_view(results)]))
        return made.message(text, trail, "tool" if calls else made.reply.finish_reason)

    def _generate(self, view: View, request: TurnRequest, round_: int) -> Steps:
        rendered, options = self.render(view), request.options
        sampling = Sampling(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, stop_ids=self.stop_ids(),
            max_new_tokens=budget(self, options),
        )  # fmt: skip
        key = request.key if round_ == 0 else (*request.key[:3], [request.key[3], round_])
        adapter = self.weights.get(self.adapter).adapter
        patches = [bound(patch, rendered.ids, rendered.layout) for patch in as_tuple(options.patch)]
        asked = Request(
            tokens=rendered.ids, sampling=sampling, key=key, adapter=adapter, layout=rendered.layout, keep=self.name,
            interventions=(*patches, *self.steerings(options)), capture=as_tuple(options.capture),
            logprobs=options.return_logprobs, forced=options.forced,
        )  # fmt: skip
        reply = yield Generate(participant=self, request=asked)
        if reply.error is not None:
            raise reply.error
        return Generation(
            participant=self, request=request, asked=asked, reply=reply, template=self.template, date=day_of(view)
        )

    def steerings(self, options: TurnOptions) -> tuple:
        """What steers this turn: its own, else the participant's."""
        return as_tuple(self.steering if options.steering is None else options.steering)


@dataclass(kw_only=True)
class Generation:
    """One generation, and what it becomes."""

    participant: ModelParticipant
    request: TurnRequest
    asked: Request
    reply: Reply
    template: Template
    date: str = ""
    """The day that its prompt shows, where the template shows one."""

    @cached_property
    def phases(self) -> tuple[str, ...]:
        """Phase of each generated token."""
        return tuple(self.reply.phases) or phases_of(self.reply.tokens, self.asked.layout.markers)

    @cached_property
    def fed(self) -> Fed:
        """The tokens as they were fed and generated, for the message."""
        return Fed(
            prompt=self.asked.tokens, generated=tuple(self.reply.tokens), phases=self.phases, layout=self.asked.layout,
            template_hash=self.template.hash,
        )  # fmt: skip

    @cached_property
    def raw(self) -> str:
        """The whole reply as text, special tokens included."""
        return self.participant.tokenizer.decode(list(self.reply.tokens), skip_special_tokens=False)

    @cached_property
    def halves(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(reasoning, answer) tokens, without the stop token."""
        tokens = tuple(self.reply.tokens)
        if tokens and tokens[-1] in self.asked.sampling.stop_ids:
            tokens = tokens[:-1]
        return split_reply(tokens, self.asked.layout.markers)

    def rest(self, family: Any, tools: ToolRegistry) -> tuple[str, list]:
        """(content, calls) of the reply."""
        decode = self.participant.tokenizer.decode
        content = decode(list(self.halves[1]), skip_special_tokens=True).strip()
        if family is None:
            return content, []
        text = self.raw if family.in_reasoning else decode(list(self.halves[1]), skip_special_tokens=False)
        left, calls = family.parse(text, tools.parameters())
        if not calls:
            return content, []
        if family.in_reasoning:
            return "", calls
        for token in self.participant.tokenizer.all_special_tokens:
            left = left.replace(token, "")
        return left.strip(), calls

    def as_view(self, results: list[dict]) -> list:
        """This generation and the results of its calls, as the next generation sees them."""
        own = ViewMessage(role="assistant", content=self.raw, author=self.participant.name, fed=self.fed, in_tools=True)
        return [own, *(ViewMessage(role="tool", content=r["result"], author=r["name"]) for r in results)]

    def message(self, content: str, trail: list, finish_reason: str) -> Message:
        """The message that the turn's last generation becomes, with its metadata and records."""
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
        if self.template.dated:
            metadata["date"] = self.date
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


def budget(participant: ModelParticipant, options: TurnOptions) -> int:
    """At most so many new tokens."""
    return participant.max_new_tokens if options.max_new_tokens is None else options.max_new_tokens


class AutoModelParticipant:
    """Makes ModelParticipants."""

    @staticmethod
    def from_pretrained(id_or_path: str, *, name: str, load_options: Mapping[str, Any] | None = None, **options: Any):
        """A participant whose model is loaded when first needed; equal ids load once per process.

        `load_options`: dtype, device, attention, revision (see `loading.load`). `options`: ModelParticipant's.
        """
        check_names(options, ModelParticipant.__init__)
        return ModelParticipant(name, Weights(id_or_path, **dict(load_options or {})), **options)

    @staticmethod
    def from_model(model: Any, tokenizer: Any, *, name: str, **options: Any) -> ModelParticipant:
        """A participant on a model that is already loaded."""
        check_names(options, ModelParticipant.__init__)
        return ModelParticipant(name, Weights(model=model, tokenizer=tokenizer), **options)


def participants_of(
    models: Any, names: Any, options: Mapping[str, Any], system_prompts: Any = None
) -> list[ModelParticipant]:
    """One participant per model, named. Equal models share their weights."""
    models = list(models) if isinstance(models, (list, tuple)) else [models]
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = [letters[i] if i < 26 else f"p{i + 1}" for i in range(len(models))] if names is None else list(names)
    if len(names) != len(models):
        raise ValueError(
            f"{len(models)} models but {len(names)} names ({', '.join(map(str, names))}); give one name for each model"
        )
    prompts = _prompts_of(names, system_prompts, options)
    options, shared = dict(options), {}
    load_options = dict(options.pop("load_options", None) or {})
    made = []
    for model, name in zip(models, names, strict=True):
        given, tokenizer = model if isinstance(model, tuple) else (model, None)
        is_name = isinstance(given, (str, os.PathLike))
        ref = (os.fspath(given) if is_name else id(given), id(tokenizer))
        if ref not in shared:
            if not is_name and not hasattr(given, "forward"):
                raise TypeError(f"a model is a name, a folder, a loaded model or (model, tokenizer), not {given!r}")
            if is_name:
                kind(os.fspath(given))  # a name that can be no model is refused now, not at the first turn
            shared[ref] = (
                Weights(os.fspath(given), tokenizer=tokenizer, **load_options)
                if is_name
                else Weights(model=given, tokenizer=tokenizer)
            )
        own = {"system_prompt": prompts[name]} if name in prompts else {}
        made.append(ModelParticipant(name, shared[ref], **{**options, **own}))
    return made


def _prompts_of(names: list[str], given: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> system prompt, of those that have one of their own."""
    if given is None:
        return {}
    if "system_prompt" in options:
        raise TypeError(
            "both system_prompt (one for all) and system_prompts (one for each) were given; give one of them"
        )
    if isinstance(given, Mapping):
        for name in given:
            if name not in names:
                raise ValueError(f"system_prompts names {name!r}, who is no participant; there are: {', '.join(names)}")
        return dict(given)
    if not isinstance(given, (list, tuple)):
        raise TypeError(
            f"system_prompts is a list with one for each model, or a dict by name, not {given!r}; system_prompt is for all"
        )
    if len(given) != len(names):
        raise ValueError(
            f"{len(names)} models but {len(given)} system prompts; give one for each model (None: none), or a dict by name"
        )
    return dict(zip(names, given, strict=True))
