"""From a request to a row: everything impossible is refused here, before any forward."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..interp.activation_cache import CaptureSpec
from ..interp.intervention import Intervention
from ..interp.locate import layers_with, require_site, resolve_layers, site_width
from ..interp.select import Select, TokenSequence
from .forward import Forward
from .request import Reply, Sampling
from .rows import Edit, Row, Take, Ticket
from .sampling import NoiseKey

COLDEST = 1e-30
"""Below this, logits over temperature overflow."""


def resolve(forward: Forward, ticket: Ticket) -> Row:
    """The row of a request. ValueError or UnknownSite saying what was given, what was possible, what to do."""
    request = ticket.request
    _check_sampling(request.sampling)
    if not request.tokens:
        raise ValueError("the request has no tokens; a prompt needs at least one")
    sequence = TokenSequence(list(request.tokens), request.layout)
    forced = request.forced
    for token in forced or ():
        sequence.append(token)
    outside = [token for token in sequence.ids if not 0 <= token < forward.vocab_size]
    if outside:
        raise ValueError(f"token ids {outside[:5]} are outside the vocabulary of {forward.vocab_size}")
    limit = forward.context_limit
    if len(sequence) > limit:
        raise ValueError(
            f"{len(sequence)} tokens do not fit the model's {limit} positions{forward.why_limited}; shorten the context"
        )
    forward.check_model()
    forward.check_adapter(request.adapter)
    edits = [_edit(forward.model, sequence, spec) for spec in request.interventions]
    intervened = any(edit is not None for edit in edits)
    takes = tuple(_take(forward.model, sequence, spec, order, intervened) for order, spec in enumerate(request.capture))
    row = Row(
        ticket=ticket,
        sequence=sequence,
        edits=tuple(sorted((e for e in edits if e is not None), key=lambda e: e.intervention.rank)),
        takes=tuple(take for take in takes if not take.clean),
        clean_takes=tuple(take for take in takes if take.clean),
        noise=NoiseKey(request.key),
        max_new_tokens=0 if forced is not None else min(request.sampling.max_new_tokens, limit - len(sequence)),
        target=len(sequence),
    )
    if forced is not None:
        row.finish_reason = "stop" if forced and forced[-1] in request.sampling.stop_ids else "length"
    elif row.max_new_tokens == 0:
        row.finish_reason = "length"
    return row


def _check_sampling(sampling: Sampling) -> None:
    if sampling.temperature != 0 and not COLDEST <= sampling.temperature < math.inf:
        raise ValueError(
            f"temperature must be 0 (argmax) or a finite number of at least {COLDEST}, got {sampling.temperature}"
        )
    if sampling.top_p is not None and not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {sampling.top_p}")
    if sampling.top_k is not None and sampling.top_k < 1:
        raise ValueError(f"top_k must be at least 1 (None: no limit), got {sampling.top_k}")
    if sampling.max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be >= 0, got {sampling.max_new_tokens}")


def _edit(model, sequence: TokenSequence, intervention: Intervention) -> Edit | None:
    """None if the intervention provably changes nothing."""
    if not isinstance(intervention, Intervention):
        raise ValueError(f"{type(intervention).__name__} is not an intervention; see interlens.interp.Intervention")
    if not isinstance(intervention.tokens, Select):
        raise ValueError(
            f"the tokens of {type(intervention).__name__} are {intervention.tokens!r}; they must be a Select: make one of "
            "what the user gives with Select.of"
        )
    site = require_site(model, intervention.site)
    layers = resolve_layers(model, intervention.layers, site)
    for layer in layers:
        intervention.check(len(layers_with(model, "residual")), site_width(model, site, layer))
    intervention.tokens.check(sequence)
    intervention.required_positions(sequence.num_prompt)
    hash(intervention.edit_key)
    if intervention.is_noop():
        return None
    steady = intervention.tokens.op in ("all", "generated", "branch") and not intervention.per_position
    late = intervention.tokens.op == "branch" and (sequence.layout.branch_start or 0) > sequence.num_prompt
    return Edit(
        intervention=intervention,
        site=site,
        layers=frozenset(layers),
        steady=steady and not late,
        fingerprint=intervention.fingerprint,
    )


def _take(model, sequence: TokenSequence, spec: CaptureSpec, order: int, intervened: bool) -> Take:
    spec.tokens.check(sequence)
    sites = [require_site(model, site) for site in spec.sites]
    lanes = [(layer, site) for site in sites for layer in resolve_layers(model, spec.layers, site)]
    position = {site: i for i, site in enumerate(sites)}
    lanes.sort(key=lambda lane: (lane[0], position[lane[1]]))
    return Take(
        order=order,
        lanes=tuple(dict.fromkeys(lanes)),
        tokens=spec.tokens,
        pool=spec.pool,
        offload=spec.offload,
        clean=spec.source == "clean" and intervened,
        max_norm=spec.max_norm,
    )


def reply_of(row: Row) -> Reply:
    """The reply of a finished row, but for its records, its finish reason and its error."""
    return Reply(
        tokens=tuple(row.sequence.generated), sampling=row.request.sampling, phases=tuple(row.sequence.phases),
        logprobs=row.logprobs or None, tokens_modified=modified(row, row.request.interventions), counters=row.counters,
    )  # fmt: skip


def modified(row: Row, interventions: Sequence[Intervention]) -> tuple[int, ...]:
    """Per intervention, how many positions of the finished sequence carry its edit, among those that are reached."""
    stop = reached(row.sequence)
    return tuple(0 if spec.is_noop() else int(spec.tokens.mask(row.sequence, 0, stop).sum()) for spec in interventions)


def reached(sequence: TokenSequence) -> int:
    """How many positions of a finished sequence count as computed: all but the last generated one.

    Nothing follows that one, so it is fed only where it is captured; what counts does not depend on that.
    """
    return len(sequence) - (len(sequence) > sequence.num_prompt)


def unreached(row: Row) -> str | None:
    """What to say if an intervention names positions that the finished sequence does not have."""
    length, end = len(row.sequence), reached(row.sequence)
    for edit in row.edits:
        beyond = [p for p in edit.intervention.required_positions(row.sequence.num_prompt) if not 0 <= p < end]
        if beyond:
            return (
                f"positions {beyond} of an intervention at {edit.site} were never reached: the sequence ended with "
                f"{length} tokens ({row.sequence.num_prompt} of them prompt), "
                f"and the last generated one feeds nothing; give positions below {end}, or narrow Patch.from_record with "
                f"tokens='prompt'"
            )
    return None
