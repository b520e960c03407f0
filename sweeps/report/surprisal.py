"""Texts whose tokens are coloured by how surprising they were to the model that said them, where that was kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from interlens import sources

from ..aggregates.shards import ShardedRun
from ..plan import model_sizes
from .markup import Markup, join, number, tag

EDGES = (0.5, 1.0, 2.0, 4.0, 6.0)
"""In nats: below the first a token has no colour; 0.5 is a chance of 61 %, 6 of 0.25 %."""

COLUMNS = ["tokens", "phases", "logprobs"]

Decode = Callable[[Sequence[int]], str]


def decoders(run: ShardedRun) -> dict[str, Decode]:
    """Participant -> how its tokens become text, of those whose tokenizer lies on this machine."""
    if not run.config.scenario.logprobs:
        return {}
    found = {}
    for name, participant in run.config.scenario.participants.items():
        tokenizer = _tokenizer(run.config, participant.model) if participant.is_local else None
        if tokenizer is not None:
            found[name] = lambda ids, t=tokenizer: t.decode(list(ids), skip_special_tokens=True)
    return found


def _tokenizer(config: Any, model: str | None) -> Any:
    from transformers import AutoTokenizer

    source = model_sizes.model(config, model or "").source
    if source in sources.EMBEDDED:
        folders = sorted((sources.cache_dir() / "models").glob(f"{source}-*/config.json"))
        source = str(folders[0].parent) if folders else source
    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=True)
    except Exception:  # the page is complete without colours: the model may be anywhere else
        return None


def coloured(row: Mapping[str, Any], decode: Decode) -> Markup | None:
    """The content of a message, a span per token; None where there are no log-probabilities or the text is another one."""
    if not row.get("logprobs") or not row.get("tokens"):
        return None
    answer = [i for run in row["phases"] if run["phase"] == "answer" for i in range(run["start"], run["end"])]
    pieces = list(_pieces([row["tokens"][i] for i in answer], [-row["logprobs"][i] for i in answer], decode))
    text = "".join(piece for piece, _ in pieces)
    if text.strip() != row["content"]:
        return None
    pieces = _stripped(pieces)
    return join([_span(piece, surprisal) for piece, surprisal in pieces])


def _pieces(tokens: Sequence[int], surprisals: Sequence[float], decode: Decode) -> Iterator[tuple[str, float]]:
    """(text, surprisal) of the tokens in order; tokens that share a character stand together, their surprisals added."""
    start, before = 0, ""
    for i in range(len(tokens)):
        context = tokens[max(start - 1, 0) : start]
        before = decode(context)
        text = decode([*context, *tokens[start : i + 1]])
        if text.endswith("\ufffd") and i + 1 < len(tokens):
            continue
        if not text.startswith(before):
            before, text = "", decode(tokens[start : i + 1])
        if len(text) > len(before):
            yield text[len(before) :], sum(surprisals[start : i + 1])
        start = i + 1


def _stripped(pieces: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Without white space at both ends, as content has none."""
    while pieces and not pieces[0][0].strip():
        pieces = pieces[1:]
    while pieces and not pieces[-1][0].strip():
        pieces = pieces[:-1]
    if pieces:
        pieces[0] = (pieces[0][0].lstrip(), pieces[0][1])
        pieces[-1] = (pieces[-1][0].rstrip(), pieces[-1][1])
    return pieces


def _span(piece: str, surprisal: float) -> Markup | str:
    level = sum(surprisal >= edge for edge in EDGES)
    return tag("span", piece, class_=f"u{level}", title=f"{number(surprisal)} nats") if level else piece


def legend() -> Markup:
    """What the colours mean."""
    shown = [tag("span", f"≥ {number(edge)}", class_=f"u{i + 1}") for i, edge in enumerate(EDGES)]
    apart = [part for span in shown for part in (span, " ")]
    return tag("p", "Tokens are coloured by their surprisal in nats: ", *apart, class_="quiet")
