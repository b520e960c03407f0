"""What a chat template can do, found out by trying it, and its skeletons: rendered prompts with holes for the contents.

A skeleton depends on roles alone: it is rendered once per sequence of roles and shared by all conversations. Contents
never go through the template where they could be mistaken for markup or be rewritten; the few that a template treats
(white space it trims, text it escapes) are tried one by one.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Any

from ..reasoning import FAMILIES, Markers, find_markers, is_inside
from .segments import Segments

SKELETONS = 4096
_templates: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_lock = threading.RLock()


def hole(n: int) -> str:
    """A content that stands for slot n: plain, unique, untouched by trimming and by JSON."""
    return f"qZx{n}xZq"


@dataclass(frozen=True)
class Shape:
    """All that a skeleton depends on besides the template."""

    roles: tuple[str, ...]
    generate: bool = True
    """Whether the prompt ends where the next reply begins."""
    tools: str = ""
    """JSON of the tool schemas given to the template; "" for none."""
    thinking: bool | None = None
    """`enable_thinking` of the template; None: not given."""
    names: tuple[str | None, ...] = ()
    """Tool names of `tool` messages, one per role."""
    structured: bool = False
    """Whether an assistant in front of `tool` messages made calls, of which each answers one."""
    date: str = ""
    """The day that `strftime_now` of the template tells, as in "2026-12-01"; "": the present one."""

    def called(self, n: int) -> bool:
        """Whether slot n made calls."""
        return self.structured and self.roles[n] == "assistant" and self.roles[n + 1 : n + 2] == ("tool",)


def _call_id(n: int) -> str:
    """Of the call that tool message n answers: nine letters and digits, as some templates want."""
    return f"call{n:05d}"


def _call(n: int, name: str) -> dict[str, Any]:
    """The call that tool message n answers, as templates are told of it."""
    return {"id": _call_id(n), "type": "function", "function": {"name": name, "arguments": {}}}


@dataclass(frozen=True)
class Reply:
    """How an assistant's turn begins: in the history, and where it is generated."""

    head: str
    """What both begin with."""
    history: str
    """What the template adds in the history."""
    prompt: str
    """What it adds where the reply is generated (an opened or an empty think block)."""


def today() -> str:
    """The present day: "2026-12-01"."""
    return datetime.date.today().isoformat()


_DIRECTIVES = (*(f"%-{c}" for c in "dmHIMSjy"), *(f"%{c}" for c in "aAwdbBmyYHIpMSfzZjUWcxXGuV"), "%%")
_CLOCK = (
    "{% macro strftime_now(format) %}{% set made = namespace(text=format) %}{% for directive, text in pinned_day | items %}"
    "{% set made.text = made.text | replace(directive, text) %}{% endfor %}{{ made.text }}{% endmacro %}\n"
)
"""Put in front of a template, so that `strftime_now` tells the pinned day: templates get data only, no functions."""


def parts_of(day: str) -> dict[str, str]:
    """What every directive of `strftime` says at midnight of a day such as "2026-12-01"."""
    try:
        moment = datetime.datetime.fromisoformat(day)
    except (TypeError, ValueError):
        raise ValueError(f"the date of a conversation is a day such as '2026-12-01', not {day!r}") from None
    return {directive: moment.strftime(directive) for directive in _DIRECTIVES}


class TemplateError(ValueError):
    """The template cannot render what it has to."""


@dataclass(eq=False)
class Template:
    """One tokenizer with its chat template. Get it with `template_of`."""

    tokenizer: Any
    source: str
    hash: str
    segments: Segments
    _skeletons: OrderedDict = field(default_factory=OrderedDict)
    _contents: OrderedDict = field(default_factory=OrderedDict)
    _replies: dict = field(default_factory=dict)
    _markers: dict = field(default_factory=dict)

    # -- rendering --------------------------------------------------------------------------------------------------
    def render(self, messages: list[dict], shape: Shape) -> str:
        """The template's own rendering. Raises whatever the template raises."""
        options: dict[str, Any] = {}
        if shape.tools:
            options["tools"] = json.loads(shape.tools)
        if shape.thinking is not None:
            options["enable_thinking"] = shape.thinking
        if shape.date:
            options["pinned_day"] = parts_of(shape.date)
        source = _CLOCK + self.source if shape.date else self.source
        text = self.tokenizer.apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=shape.generate, **options
        )
        return self.bos + text if self.bos and not text.startswith(self.bos) else text

    def skeleton(self, shape: Shape) -> list[str]:
        """The markup before, between and after the contents: len(roles) + 1 texts. Raises TemplateError."""
        with _lock:
            if shape in self._skeletons:
                self._skeletons.move_to_end(shape)
                return self._skeletons[shape]
        try:
            text = self.render(self._messages(shape, [hole(n) for n in range(len(shape.roles))]), shape)
        except Exception as error:
            raise TemplateError(
                f"the chat template refuses the roles {', '.join(shape.roles) or '(none)'}: {error}"
            ) from error
        parts, rest = [], text
        for n in range(len(shape.roles)):
            before, found, rest = rest.partition(hole(n))
            if not found or hole(n) in rest:
                raise TemplateError(
                    f"the chat template {'repeats' if found else 'drops or reorders'} message {n} ({shape.roles[n]}) "
                    f"of the roles {', '.join(shape.roles)}"
                )
            parts.append(before)
        with _lock:
            self._skeletons[shape] = [*parts, rest]
            while len(self._skeletons) > SKELETONS:
                self._skeletons.popitem(last=False)
        return [*parts, rest]

    def content(self, text: str, n: int, shape: Shape) -> str:
        """What the template makes of `text` as the content of slot n (trimmed, escaped); usually `text` itself."""
        role = shape.roles[n]
        if self.leaves(role, text):
            return text
        # trimming and escaping depend on the role and on being first or last; removing reasoning on the whole talk
        place = (shape.roles[:2] if n < 2 else (), n == len(shape.roles) - 1)
        key = (shape, n, text) if self.rewrites(role, text) else (role, place, text)
        if key not in self._contents:
            contents = [hole(m) for m in range(len(shape.roles))]
            contents[n] = text
            parts = self.skeleton(shape)
            before, after = self._around(parts, n)
            try:
                made = self.render(self._messages(shape, contents), shape)
            except Exception as error:
                raise TemplateError(f"the chat template refuses the {role} content {text!r}: {error}") from error
            fits = made.startswith(before) and made.endswith(after) and len(made) >= len(before) + len(after)
            self._contents[key] = made[len(before) : len(made) - len(after)] if fits else text.strip()
            while len(self._contents) > SKELETONS:
                self._contents.popitem(last=False)
        return self._contents[key]

    def leaves(self, role: str, text: str) -> bool:
        """Whether templates leave such a content as it is."""
        return role != "tool" and bool(text) and text == text.strip() and not self.rewrites(role, text)

    @staticmethod
    def rewrites(role: str, text: str) -> bool:
        """Whether a template may take reasoning out of such a content."""
        return role == "assistant" and any(close in text for _, close in FAMILIES.values())

    def _around(self, parts: list[str], n: int) -> tuple[str, str]:
        before = "".join(parts[m] + hole(m) for m in range(n)) + parts[n]
        after = parts[n + 1] + "".join(hole(m) + parts[m + 1] for m in range(n + 1, len(parts) - 1))
        return before, after

    def _messages(self, shape: Shape, contents: list[str]) -> list[dict]:
        messages = []
        for n, (role, content) in enumerate(zip(shape.roles, contents, strict=True)):
            message: dict[str, Any] = {"role": role, "content": content}
            if role == "tool":
                message |= {"name": shape.names[n] or "tool", "tool_call_id": _call_id(n)}
            elif shape.called(n):
                results = takewhile(lambda m: shape.roles[m] == "tool", range(n + 1, len(shape.roles)))
                calls = [_call(m, shape.names[m] or "tool") for m in results]
                calls[0]["function"]["arguments"] = {"text": content}
                message |= {"content": "", "tool_calls": calls}
            messages.append(message)
        return messages

    @cached_property
    def dated(self) -> bool:
        """Whether prompts show the day on which they are made."""
        return "strftime_now" in self.source

    # -- what it can do ---------------------------------------------------------------------------------------------
    @cached_property
    def bos(self) -> str:
        """The BOS text to put in front of a rendering that lacks it; "" if this tokenizer wants none."""
        token = self.tokenizer.bos_token
        if not token:
            return ""
        plain = self.tokenizer("a")["input_ids"]
        return token if plain and plain[0] == self.tokenizer.bos_token_id else ""

    def takes(self, *roles: str, generate: bool = True, structured: bool = False) -> bool:
        """Whether the template renders these roles, each once and in order."""
        try:
            self.skeleton(Shape(roles, generate, names=(None,) * len(roles), structured=structured))
        except TemplateError:
            return False
        return True

    @cached_property
    def takes_system(self) -> bool:
        """Whether a conversation may begin with a system message."""
        return self.takes("system", "user") and self.takes("system", "user", "assistant", "user")

    @cached_property
    def takes_any_order(self) -> bool:
        """Two users in a row, an assistant first, two assistants in a row."""
        return (
            self.takes("user", "user")
            and self.takes("assistant", "user")
            and self.takes("user", "assistant", "assistant", "user")
        )

    @cached_property
    def takes_nothing(self) -> bool:
        """A prompt without any message."""
        return self.takes()

    @cached_property
    def takes_system_alone(self) -> bool:
        """Whether the template accepts a system message with nothing after it."""
        return self.takes("system")

    @cached_property
    def takes_tool_role(self) -> bool:
        """Whether it shows tool results, several and in several rounds, after whatever an assistant said."""
        return self._takes_results(structured=False)

    @cached_property
    def takes_tool_calls(self) -> bool:
        """Whether it shows tool results only after calls that it is told of, and ends these with the end of turn."""
        if self.takes_tool_role or not self.end_of_turn or not self._takes_results(structured=True):
            return False
        shape = Shape(("user", "assistant", "tool"), names=(None,) * 3, structured=True)
        return self.tokenizer.decode(list(self.end_of_turn)) in self.skeleton(shape)[2]

    def _takes_results(self, structured: bool) -> bool:
        one = ("user", "assistant", "tool")
        several = (*one, "tool", "assistant", "tool")
        return self.takes(*one, structured=structured) and self.takes(*several, structured=structured)

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template shows the tools it is given."""
        name = "probe_tool_qzx"
        schema = {"type": "function", "function": {"name": name, "description": "d", "parameters": _NO_PARAMETERS}}
        try:
            parts = self.skeleton(Shape(("user",), tools=json.dumps([schema])))
        except TemplateError:
            return False
        return any(name in part for part in parts)

    def reply(self, thinking: bool | None) -> Reply:
        """How a reply begins, in the history and where it is generated."""
        if thinking in self._replies:
            return self._replies[thinking]
        history = self.skeleton(Shape(("user", "assistant", "user"), False, thinking=thinking))[1]
        prompt = self.skeleton(Shape(("user",), True, thinking=thinking))[1]
        end = self.skeleton(Shape(("user",), False, thinking=thinking))[1]
        common = len(_common(history, prompt))
        head = history[min(len(_common(end, prompt)), common) : common]
        self._replies[thinking] = Reply(head, history[common:], prompt[common:])
        return self._replies[thinking]

    def reply_markers(self, thinking: bool | None, texts: tuple[str, str] | None = None) -> Markers | None:
        """Markers for a generation: `opened` if the prompt itself ends inside reasoning. `texts`: given ones."""
        key = (thinking, texts)
        if key not in self._markers:
            found = find_markers(self.tokenizer, self.source, texts) if texts else self.markers
            if found is not None:
                begun = self.tokenizer(self.reply(thinking).prompt, add_special_tokens=False)["input_ids"]
                found = replace(found, opened=is_inside(begun, found))
            self._markers[key] = found
        return self._markers[key]

    @cached_property
    def end_of_turn(self) -> tuple[int, ...]:
        """The token that ends an assistant's turn, if the template ends it with one special token."""
        text = self.skeleton(Shape(("user", "assistant", "user"), False))[2]
        added = self.tokenizer.added_tokens_decoder.items()
        ends = [i for i, a in added if a.special and text.lstrip(" ").startswith(a.content)]
        return tuple(sorted(ends, key=lambda i: -len(self.tokenizer.decode([i])))[:1])

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens: BOS, stop and markup."""
        added = {i for i, a in self.tokenizer.added_tokens_decoder.items() if a.special}
        return frozenset(added | set(self.tokenizer.all_special_ids) | set(self.end_of_turn))

    @cached_property
    def markers(self) -> Markers | None:
        """How this family opens and closes reasoning."""
        return find_markers(self.tokenizer, self.source)


_NO_PARAMETERS = {"type": "object", "properties": {}}


def _common(a: str, b: str) -> str:
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:n]


def template_of(tokenizer: Any) -> Template:
    """The Template of a tokenizer, made once. Raises TemplateError for one without a usable chat template."""
    source = tokenizer.chat_template
    if isinstance(source, dict):
        source = source.get("default") or next(iter(source.values()), None)
    if not source:
        raise TemplateError(
            f"tokenizer {tokenizer.name_or_path!r} has no chat template, so it cannot take part in a conversation; set "
            "tokenizer.chat_template, or use an instruction-tuned model"
        )
    with _lock:
        known = _templates.get(tokenizer)
        if known is None or known.source != source:
            vocabulary = sorted(tokenizer.get_vocab().items())
            body = json.dumps([source, vocabulary, tokenizer.special_tokens_map], default=str)
            digest = hashlib.blake2b(body.encode(), digest_size=8).hexdigest()
            known = Template(weakref.proxy(tokenizer), source, digest, Segments(weakref.proxy(tokenizer)))
            _templates[tokenizer] = known
            if not known.takes("user", "assistant", "user"):
                del _templates[tokenizer]
                known.skeleton(Shape(("user", "assistant", "user")))
            known.segments.special_ids = known.special_ids
        return known
