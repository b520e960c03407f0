"""What the engine is held against: plain transformers forwards with torch hooks of our own, noise and cuts in numpy.

Nothing here uses `interlens` to compute: an edit is a hand-written function of a row of hidden states, a selection is a
hand-written set of positions, every token is drawn after a full forward without any cache.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from interlens.engine.request import Reply, Request, Sampling
from interlens.interp import Patch, Select, SteeringSpec
from interlens.interp.select import Layout
from tests.support.tiny import MOE_FAMILIES, tiny

WIDTH = 32
LAYERS = 3
MAIN = ("llama", "gemma3", "gpt2", "mixtral")
"""Full attention, sliding windows, learned positions, experts: the laws that need not run on every family."""


@cache
def model_of(family: str, **overrides):
    """One shared model per family: float64, MoE in float32."""
    return tiny(family, torch.float32 if family in MOE_FAMILIES else torch.float64, **overrides)


def tolerance(model) -> dict:
    """Norms and softmaxes of transformers round to float32 even in a float64 model."""
    return dict(rtol=1e-3, atol=2e-4) if next(model.parameters()).dtype == torch.float32 else dict(rtol=1e-5, atol=2e-6)


def direction(seed: int = 0, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(3, 100, (length,), generator=torch.Generator().manual_seed(1000 + seed)).tolist())


# Edits by hand


@dataclass(frozen=True)
class Hand:
    """`change(rows [n, W], layer, positions)` of `site` at `layers`, at positions `at(ids, num_prompt, layout)`."""

    layers: tuple[int, ...]
    at: Callable
    change: Callable
    site: str = "residual"


def everywhere(ids, num_prompt, layout):
    return range(len(ids))


def phases(ids, num_prompt, layout) -> list[str]:
    """Phase of every position; markers of one token only."""
    names, markers = ["prompt"] * num_prompt, layout.markers
    inside = markers is not None and markers.opened
    for token in ids[num_prompt:]:
        marker = markers is not None and (token,) in (markers.close if inside else markers.open)
        names.append("reasoning" if inside or marker else "answer")
        inside ^= marker
    return names


def steer(
    seed=0, layers=(1,), coef=1.0, mode="add", tokens=None, at=everywhere, site="residual", each=False
) -> tuple[SteeringSpec, Hand]:
    """A spec and the same edit by hand. `each`: another direction at every layer."""
    vectors = {layer % LAYERS: direction(seed + 17 * layer * each) for layer in layers}
    spec = SteeringSpec(
        vectors if each else vectors[layers[0] % LAYERS],
        layers,
        coef,
        mode,
        site,
        Select.all() if tokens is None else tokens,
    )

    def change(h, layer, positions):
        d = vectors[layer].to(h.dtype)
        u = d / d.square().sum().sqrt()
        along = torch.einsum("nd,d->n", h, u)
        return {
            "add": lambda: h + coef * d,
            "ablate": lambda: h - coef * torch.outer(along, u),
            "norm_add": lambda: h + coef * torch.outer(h.square().sum(-1).sqrt(), u),
            "replace": lambda: h + torch.outer(coef - along, u),
        }[mode]()

    return spec, Hand(tuple(layer % LAYERS for layer in layers), at, change, site)


def patch(positions, layer=1, seed=0, values=None, site="residual") -> tuple[Patch, Hand]:
    if values is None:
        generator = torch.Generator().manual_seed(seed + 99)
        values = torch.randn(len(positions), WIDTH, generator=generator, dtype=torch.float64)

    def absolute(num_prompt):
        return [p + num_prompt if p < 0 else p for p in positions]

    def at(ids, num_prompt, layout):
        return [p for p in absolute(num_prompt) if p < len(ids)]

    def change(h, layer, where):
        rows = {p: values[i] for i, p in enumerate(absolute(change.num_prompt))}
        return torch.stack([rows[p] for p in where]).to(h.dtype)

    return Patch(values, layer, tuple(positions), site), Hand((layer % LAYERS,), at, change, site)


# Forwards by hand


def blocks(model):
    """The decoder layers."""
    for path in ("model.layers", "model.decoder.layers", "transformer.h", "gpt_neox.layers"):
        with suppress(AttributeError):
            return model.get_submodule(path)


def _module(model, site: str, layer: int):
    inner = next(getattr(model, name) for name in ("model", "transformer", "gpt_neox") if hasattr(model, name))
    block = blocks(model)[layer]
    return {
        "residual": lambda: (block, "out"),
        "resid_pre": lambda: (block, "in"),
        "mlp": lambda: (block.mlp, "out"),
        "attn": lambda: (block.self_attn, "out"),
        "q": lambda: (block.self_attn.q_proj, "out"),
        "embed": lambda: (inner.embed_tokens, "out"),
        "final_norm": lambda: (inner.norm, "out"),
    }[site]()


@dataclass
class Run:
    """States `[S, W]` after all edits by (layer, site), and logits `[S, V]`, of one sequence."""

    ids: tuple[int, ...]
    num_prompt: int
    states: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.ids[self.num_prompt :]

    def logprobs(self) -> np.ndarray:
        """Of generated tokens, in nats."""
        z = self.logits[self.num_prompt - 1 : len(self.ids) - 1].double().numpy()
        z = z - z.max(-1, keepdims=True)
        z = z - np.log(np.exp(z).sum(-1, keepdims=True))
        return z[np.arange(len(z)), list(self.tokens)]


def forward(model, ids: Sequence[int], num_prompt: int, hands: Sequence[Hand] = (), keep=(), layout=None) -> Run:
    """One forward over the whole sequence, no cache, edits in order; keeps the states of (layer, site) in `keep`."""
    run, layout = Run(tuple(ids), num_prompt), layout or Layout()
    keys = dict.fromkeys([*((layer, hand.site) for hand in hands for layer in hand.layers), *keep])
    keys = [key for key in keys if key[1] != "logits"]

    def visit(key, value):
        layer, site = key
        for hand in hands:
            if layer in hand.layers and site == hand.site:
                where = list(hand.at(ids, num_prompt, layout))
                if where:
                    hand.change.__dict__["num_prompt"] = num_prompt
                    value = value.clone()
                    value[0, where] = hand.change(value[0, where], layer, where)
        run.states[key] = value[0].clone()
        return value

    def out_hook(key):
        def hook(module, args, output):
            value = visit(key, output[0] if isinstance(output, tuple) else output)
            return (value, *output[1:]) if isinstance(output, tuple) else value

        return hook

    def in_hook(key):
        return lambda module, args, kwargs: ((visit(key, args[0]), *args[1:]), kwargs)

    with ExitStack() as stack, torch.no_grad():
        for layer, site in keys:
            module, end = _module(model, site, layer)
            if end == "out":
                handle = module.register_forward_hook(out_hook((layer, site)))
            else:
                handle = module.register_forward_pre_hook(in_hook((layer, site)), with_kwargs=True)
            stack.callback(handle.remove)
        run.logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    for hand in hands:
        if hand.site == "logits" and (where := list(hand.at(ids, num_prompt, layout))):
            run.logits[where] = hand.change(run.logits[where], LAYERS - 1, where)
    run.states[LAYERS - 1, "logits"] = run.logits
    return run


def generate(model, request: Request, hands: Sequence[Hand] = (), keep=()) -> Run:
    """The reply of a request by full recomputation at every step; states and logits of the finished sequence."""
    ids, num_prompt, sampling = list(request.tokens), len(request.tokens), request.sampling
    for step in range(sampling.max_new_tokens):
        logits = forward(model, ids, num_prompt, hands, layout=request.layout).logits[-1]
        ids.append(choose(logits.double().numpy(), sampling, request.key, step))
        if ids[-1] in sampling.stop_ids:
            break
    return forward(model, ids, num_prompt, hands, keep, request.layout)


# Noise by hand


def uniforms(key: tuple, step: int, vocab: int) -> np.ndarray:
    """SplitMix64 at counters 1..vocab of the stream seeded by blake2b(JSON of the key, step)."""
    digest = hashlib.blake2b(json.dumps(key, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(),
                             digest_size=8)  # fmt: skip
    digest.update(step.to_bytes(8, "little"))
    z = np.frombuffer(digest.digest(), dtype="<u8")[0]
    with np.errstate(over="ignore"):
        z = z + np.arange(1, vocab + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return ((z >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52


def kept(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Bool [V]: which tokens top-k, then top-p of those, leave, by sorting everything. Equal logits stay together."""
    scores = logits / sampling.temperature
    p = np.exp(scores - scores.max())
    if sampling.top_k is None and (sampling.top_p is None or sampling.top_p >= 1):
        return p >= 1e-7
    smallest = np.sort(p)[::-1][min(sampling.top_k or len(p), len(p)) - 1]
    left = p >= smallest
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered = np.sort(p[left])[::-1][: sampling.top_k]
        mass = np.cumsum(ordered / ordered.sum())
        smallest = ordered[min(int((mass < sampling.top_p).sum()), len(ordered) - 1)]
        left &= p >= smallest
    return left


def choose(logits: np.ndarray, sampling: Sampling, key: tuple, step: int) -> int:
    if sampling.temperature == 0:
        return int(logits.argmax())
    scores = logits / sampling.temperature
    with np.errstate(divide="ignore"):
        race = -np.log(uniforms(key, step, len(logits))) / np.exp(scores - scores.max())
    return int(np.where(kept(logits, sampling), race, np.inf).argmin())


# Comparing


def drain(engine, tickets, limit: int = 2000) -> list[Reply]:
    """Step until every ticket is answered; fails rather than hangs."""
    for _ in range(limit):
        if all(ticket.reply is not None for ticket in tickets):
            return [ticket.reply for ticket in tickets]
        assert engine.step() or all(ticket.reply is not None for ticket in tickets), "nothing to do, but not answered"
    raise AssertionError(f"not answered after {limit} steps")


def check(reply: Reply, run: Run, model) -> None:
    """Tokens equal; logprobs and unpooled records, where there are any, equal to rounding."""
    assert reply.error is None, reply.error
    assert reply.tokens == run.tokens
    if reply.logprobs is not None:
        np.testing.assert_allclose(reply.logprobs["logprobs"], run.logprobs(), **tolerance(model))
        assert reply.logprobs["surprisal"] == [-v for v in reply.logprobs["logprobs"]]
    for record in reply.records:
        if record.pool is None:
            expected = run.states[record.layer, record.site][list(record.positions)]
            torch.testing.assert_close(record.tensor, expected, **tolerance(model))
            assert record.tokens == tuple(run.ids[p] for p in record.positions)


def same(one: Reply, other: Reply, model, exact: bool = False) -> None:
    """Two replies say the same: tokens, phases, reasons, logprobs and records."""
    assert type(one.error) is type(other.error)
    assert (one.tokens, one.phases, one.finish_reason) == (other.tokens, other.phases, other.finish_reason)
    assert one.tokens_modified == other.tokens_modified
    tol = dict(rtol=0, atol=0) if exact else tolerance(model)
    assert (one.logprobs is None) == (other.logprobs is None)
    for name in one.logprobs or ():
        np.testing.assert_allclose(one.logprobs[name], other.logprobs[name], **tol)
    assert len(one.records) == len(other.records)
    for a, b in zip(one.records, other.records, strict=True):
        torch.testing.assert_close(a.tensor, b.tensor, **tol)
        for name in ("layer", "site", "token_span", "phases", "tokens", "positions", "pool", "num_pooled", "selection"):
            assert getattr(a, name) == getattr(b, name), name
        assert re.fullmatch(r"[0-9a-f+]*", a.fingerprint) and a.fingerprint == b.fingerprint
