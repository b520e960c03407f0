"""Groups, memory, the table of rows and the mover: pure bookkeeping, without a model."""

import itertools
import random
from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlens.engine.memory import BLOCK, Memory, Prefix
from interlens.engine.offload import Mover
from interlens.engine.request import Request
from interlens.engine.rows import Row, Ticket, prefill_groups
from interlens.engine.sampling import NoiseKey
from interlens.engine.slabs import Slabs
from interlens.engine.table import Table
from interlens.interp.select import TokenSequence

# Groups


def cost(lengths, groups, overhead):
    return sum(len(group) * max(lengths[i] for i in group) + overhead for group in groups)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.sampled_from([0, 10, 48]), st.sampled_from([60, 900]))
def test_groups_are_the_cheapest_split_of_rows_by_length(lengths, overhead, area):
    groups = prefill_groups(lengths, overhead=overhead, area=area)
    flat = [i for group in groups for i in group]
    assert sorted(flat) == list(range(len(lengths)))
    assert [lengths[i] for i in flat] == sorted(lengths)
    order, best = sorted(range(len(lengths)), key=lambda i: lengths[i]), float("inf")
    for cuts in itertools.product([False, True], repeat=len(lengths) - 1):
        ends = [i + 1 for i, cut in enumerate(cuts) if cut] + [len(lengths)]
        split = [order[a:b] for a, b in itertools.pairwise([0, *ends])]
        if all(len(g) == 1 or len(g) * max(lengths[i] for i in g) <= area for g in split):
            best = min(best, cost(lengths, split, overhead))
    assert cost(lengths, groups, overhead) == best
    assert prefill_groups([]) == []


# Memory


def prefix(ids, signature=None, adapter=None, **options):
    ids = np.array(ids, dtype=np.int64)
    signature = np.zeros(len(ids), dtype=np.int64) if signature is None else np.array(signature, dtype=np.int64)
    return Prefix(
        **{"adapter": adapter, "ids": ids, "signature": signature, "source": object(), "parked": True, **options}
    )


def common(a, b):
    if a.adapter != b.adapter:
        return 0
    n = min(len(a), len(b))
    equal = (a.ids[:n] == b.ids[:n]) & (a.signature[:n] == b.signature[:n])
    return n if equal.all() else int(equal.argmin())


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1))
def test_memory_finds_the_longest_common_prefix_and_never_a_wrong_one(seed):
    rng = random.Random(seed)
    memory, known = Memory(), []

    def any_prefix(**options):
        ids, signature = [0] * rng.randrange(1, 90), None
        signature = [0] * len(ids)
        for _ in range(rng.randrange(3)):
            ids[rng.randrange(len(ids))] = rng.randrange(3)
        for _ in range(rng.randrange(3)):
            signature[rng.randrange(len(ids))] = rng.randrange(3)
        return prefix(ids, signature, adapter=rng.choice([None, None, "a"]), name=rng.choice("xyz"), **options)

    for _ in range(rng.randrange(1, 12)):
        parked = rng.random() < 0.7
        new = any_prefix(parked=parked, ready=parked or rng.random() < 0.5)
        memory.add(new)
        if len(new) >= BLOCK:
            if parked:
                known = [p for p in known if not (p.parked and len(p) <= len(new) and common(p, new) == len(p))]
            known.append(new)
        if known and rng.random() < 0.2:
            memory.remove(known.pop(rng.randrange(len(known))))
    assert memory.parked_columns == sum(len(p) for p in known if p.parked)
    assert len(memory) == sum(p.parked for p in known)
    for _ in range(10):
        query = any_prefix()
        found, shared, promised = memory.find(query.adapter, query.ids, query.signature)
        ready = max((common(p, query) for p in known if p.ready), default=0)
        pending = max((common(p, query) for p in known if not p.ready), default=0)
        assert shared == (ready if ready >= BLOCK else 0)
        assert promised == (pending if pending // BLOCK >= max(1, shared // BLOCK) else 0)
        assert (found is None) == (shared == 0)
        if found is not None:
            assert found in known and found.ready and common(found, query) == shared


def test_memory_evicts_the_least_recently_used_first():
    memory = Memory()
    four = [prefix([i] * 40, name="ab"[i % 2]) for i in range(4)]
    for each in four:
        memory.add(each)
    memory.find(None, four[0].ids, four[0].signature)
    assert memory.evict(130) == 40 and memory.evictions == 1
    found = [memory.find(None, p.ids, p.signature)[0] for p in four]
    assert found == [four[0], None, four[2], four[3]]
    memory.forget(["b"])
    assert len(memory) == 2 and memory.parked_columns == 80
    assert memory.evict(80) == 0 and memory.evict(0) == 80 and not memory._blocks


# The table


def a_row(rng, name):
    sequence = TokenSequence([rng.randrange(3)] * rng.randrange(1, 40) + [name])
    request = Request(tokens=tuple(sequence.ids), key=(name,))
    return Row(
        ticket=Ticket(request), sequence=sequence, edits=(), takes=(), noise=NoiseKey((name,)), max_new_tokens=9,
        target=len(sequence),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_rows_keep_their_own_columns_wherever_they_are_moved(seed):
    """Column p of a row holds the id at p, as a stand-in for keys and values; rows come, fork, park, start over, go."""
    rng = random.Random(seed)
    slabs, memory = Slabs(), Memory()
    slabs.keys[0], slabs.values[0] = torch.zeros(0, 1, 0, 1), torch.zeros(0, 1, 0, 1)
    budget = rng.choice([90, 300, 5000])
    table, waiting, num_rows = Table(slabs, memory, budget, rng.random() < 0.8), deque(), rng.choice([1, 3, 6])
    names = iter(range(100, 10_000))

    def compute(row, stop):
        for p in range(row.written, stop):
            slabs.keys[0][row.index, 0, p] = slabs.values[0][row.index, 0, p] = float(row.sequence.ids[p])
        row.written, row.fed = max(row.written, stop), stop

    def verify():
        assert [row.index for row in table.live] == list(range(len(table.live)))
        assert [row.index for row in table.prefilling] == list(range(len(table.live), table.end)) or table.groups
        assert len({row.index for row in (*table.live, *table.prefilling)}) == len(table.live) + len(table.prefilling)
        for row in (*table.live, *table.prefilling):
            assert row.written <= len(row.sequence)
            assert slabs.keys[0][row.index, 0, : row.written, 0].tolist() == row.sequence.ids[: row.written]
        if len(table.live) + len(table.prefilling) > 1:
            assert table.allocated + memory.parked_columns <= budget

    for _ in range(120):
        action = rng.random()
        if action < 0.35:
            waiting.append(a_row(rng, next(names)))
        elif action < 0.6 and waiting and num_rows > table.end:
            chosen = table.choose(waiting, num_rows - table.end)
            assert len(chosen) <= num_rows
            if chosen:
                table.place(chosen)
        elif action < 0.8 and table.groups:
            for row in table.groups[0]:
                compute(row, row.target)
            table.join()
        elif action < 0.9 and table.live:
            fits = table.overflow()
            if fits is None:
                for row in table.live:
                    row.sequence.append(rng.randrange(3))
                if table.overflow() is None:
                    table.reserve(table.end, max(len(row.sequence) for row in table.live))
                    for row in table.live:
                        compute(row, len(row.sequence))
        elif action < 0.97 and table.live:
            row = rng.choice(table.live)
            row.error = ValueError() if rng.random() < 0.2 else None
            table.leave(row, keep=rng.choice([None, "bob"]))
        elif table.live or table.groups:
            removed = table.evacuate(rng.randrange(len(table.live) + 1))
            waiting.extendleft(row for row in removed if row.error is None)
        verify()


# The mover


class Recorded:
    """Streams that do nothing until they are waited for, and write down what is asked of them."""

    def __init__(self):
        self.events, self.pending = [], {}

    def fork(self):
        self.events.append("fork")

    def copy(self, target, source):
        number = len(self.pending)
        self.pending[number] = (target, source)
        self.events.append(("copy", number))
        return number

    def wait(self, event):
        target, source = self.pending[event]
        target.copy_(source)
        self.events.append(("wait", event))


def test_transfers_are_queued_behind_compute_and_buffers_wait_for_their_last_use():
    streams = Recorded()
    mover = Mover(torch.device("cpu"), buffer_bytes=4 * 8 * 10, streams=streams)
    parts = [[torch.full((2, 8), float(i)), torch.full((1, 8), float(i) + 0.5)] for i in range(4)]
    shares = [np.array([0, 2]), np.array([1])]
    claims = [mover.move(each, "cpu", shares) for each in parts]
    assert streams.events == [
        "fork", ("copy", 0), "fork", ("copy", 1), ("wait", 0), "fork", ("copy", 2), ("wait", 1), "fork", ("copy", 3),
    ]  # fmt: skip
    for each in parts:
        for part in each:
            part.fill_(-1)
    for i in (3, 0, 2, 1):
        rows, other = (claim.rows() for claim in claims[i])
        assert rows[:, 0].tolist() == [i, i + 0.5] and other.tolist() == [[float(i)] * 8]
        assert rows.untyped_storage().nbytes() == claims[i][0].num_bytes == 2 * 8 * 4
    assert streams.events[-2:] == [("wait", 3), ("wait", 2)]
    assert mover.bytes_moved == 4 * 3 * 8 * 4
    assert sum(1 for buffer in mover._buffers if buffer is not None) == 2
    for rows, target in ((40, "cpu"), (2, None)):  # larger than a buffer; not to be moved
        part = torch.ones(rows, 8)
        (claim,) = mover.move([part], target, [np.arange(rows)])
        part.fill_(-1)
        assert claim.rows().tolist() == [[1.0] * 8] * rows
    assert len(streams.events) == 12
