"""Out of memory anywhere in a step: fewer rows, the same tokens, one line in the report."""

import functools
from dataclasses import replace

import pytest
import torch

from interlens.engine.collect import Collector
from interlens.engine.engine import Engine
from interlens.engine.slabs import Slabs
from interlens.interp import CaptureSpec, SteeringSpec
from tests.engine.test_faults import Custom, requests
from tests.support.reference import direction, drain, model_of, prompt, same
from tests.support.tiny import tiny


def hungry(limit):
    """A model that runs out of memory above `limit` rows."""
    model = tiny("llama", torch.float64)

    class Hungry(type(model)):  # ty: ignore[unsupported-base]
        @functools.wraps(type(model).forward)
        def forward(self, *args, **kwargs):
            self.seen.append(kwargs["input_ids"].shape[0])
            if self.seen[-1] > limit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is")
            return super().forward(*args, **kwargs)

    model.seen = []
    model.__class__ = Hungry
    return model


@pytest.mark.parametrize("chunk", [4, 512])
def test_out_of_memory_halves_the_rows_once_and_changes_no_token(chunk):
    model = hungry(4)
    asked = [replace(r, keep="bob", forced=(5, 6, 7) if i == 3 else None) for i, r in enumerate(requests(7))]
    asked[4] = replace(asked[4], interventions=(SteeringSpec(direction(), (0,), 2.0),))
    engine = Engine(model, rows=8, chunk=chunk)
    replies = drain(engine, [engine.submit(request) for request in asked])
    for one, other in zip(replies, Engine(model_of("llama")).run(asked), strict=True):
        same(one, other, model)
    assert engine.rows <= 4 and engine._collector.bytes_held == 0
    assert len(engine.reports) == engine.counters["out_of_memory"] == 1
    assert "rows" in engine.reports[0] and str(engine.rows) in engine.reports[0]
    seen = len(model.seen)
    drain(engine, [engine.submit(request) for request in asked])
    assert max(model.seen[seen:]) <= 4 and engine.counters["out_of_memory"] == 1


class SmallSlabs(Slabs):
    """Slabs that cannot be allocated above a number of columns."""

    limit = 1 << 30

    def resize(self, num_rows, num_columns):
        if num_rows * num_columns > self.limit:
            raise torch.OutOfMemoryError(f"no room for {num_rows} x {num_columns}")
        super().resize(num_rows, num_columns)


@pytest.mark.parametrize("limit", [3 * 64, 64])
def test_out_of_memory_while_rows_are_placed_loses_nobody(limit):
    model = model_of("llama")
    engine = Engine(model, rows=8)
    engine.slabs = engine._table.slabs = SmallSlabs()
    engine.slabs.limit = limit
    asked = [replace(r, keep="bob") for r in requests(7)]
    replies = drain(engine, [engine.submit(request) for request in asked])
    for one, other in zip(replies, Engine(model).run(asked), strict=True):
        same(one, other, model)
    assert engine.counters["out_of_memory"] >= 1 and not engine._waiting


def test_out_of_memory_with_one_row_is_its_own_error():
    model = hungry(0)
    engine = Engine(model)
    replies = drain(engine, [engine.submit(request) for request in requests(4)])
    assert all(isinstance(reply.error, MemoryError) and "single row" in str(reply.error) for reply in replies)
    assert not engine.step() and engine._collector.bytes_held == 0


def test_one_row_in_wide_slabs_gives_up_the_spare_ones_before_it_fails():
    model = model_of("llama")
    engine = Engine(model, rows=8)
    engine.slabs = engine._table.slabs = SmallSlabs()
    first = [replace(r, keep="bob") for r in requests(4)]
    drain(engine, [engine.submit(request) for request in first])
    engine.slabs.limit = engine.slabs.num_rows * engine.slabs.num_columns
    long = replace(first[0], tokens=prompt(90, 5))
    same(drain(engine, [engine.submit(long)])[0], Engine(model).run([long])[0], model)


class Torn(Collector):
    """Runs out of memory in the middle of taking over what a forward has gathered."""

    calls, when = 0, ()

    def _pool(self, lane, gathered):
        self.calls += 1
        if self.calls in self.when:
            raise torch.OutOfMemoryError("no room for a pool")
        super()._pool(lane, gathered)


class Cramped(Collector):
    """Runs out of memory while rows are moved or records are made."""

    calls, when = 0, ()

    def spend(self):
        self.calls += 1
        if self.calls in self.when:
            raise RuntimeError("CUDA error: out of memory")

    def flush(self):
        if self._staged:
            self.spend()
        super().flush()

    def records(self, row):
        made = super().records(row)
        if made:
            self.spend()
        return made


@pytest.mark.parametrize("when", [(1,), (2, 3), (4,), (1, 9)])
def test_out_of_memory_while_records_are_made_loses_nobody(when):
    model = model_of("llama")
    asked = [replace(r, keep="bob") for r in requests(6, capture=(CaptureSpec(), CaptureSpec(pool="max")))]
    engine = Engine(model, rows=6)
    engine._collector.__class__, engine._collector.when = Cramped, when
    replies = drain(engine, [engine.submit(request) for request in asked])
    for one, other in zip(replies, Engine(model).run(asked), strict=True):
        same(one, other, model)
    assert engine.counters["out_of_memory"] == len(when) and engine._collector.bytes_held == 0
    for name in ("decode_tokens", "prefill_tokens"):
        assert engine.counters[name] == sum(reply.counters[name] for reply in replies)


def test_out_of_memory_inside_an_edit_is_no_fault_of_the_edit():
    def hungry_edit(hidden):
        if len(hidden) > 30:
            raise torch.OutOfMemoryError("no room for a norm")
        return hidden + 1

    model = model_of("llama")
    asked = [replace(r, interventions=(Custom(hungry_edit),)) for r in requests(5)]
    engine = Engine(model, rows=8)
    replies = drain(engine, [engine.submit(request) for request in asked])
    easy = [replace(r, interventions=(Custom(lambda h: h + 1),)) for r in requests(5)]
    for one, other in zip(replies, Engine(model).run(easy), strict=True):
        assert one.error is None and one.tokens == other.tokens
    assert engine.rows < 5 and len(engine.reports) == engine.counters["out_of_memory"] > 0


@pytest.mark.parametrize("when", [(1,), (5,), (2, 30)])
def test_out_of_memory_in_the_middle_of_a_capture_doubles_no_row(when):
    model = model_of("llama")
    asked = requests(6, capture=(CaptureSpec(), CaptureSpec(pool="mean")))
    engine = Engine(model, rows=6, chunk=8)
    engine._collector.__class__ = Torn
    engine._collector.when = when
    replies = drain(engine, [engine.submit(request) for request in asked])
    for one, other in zip(replies, Engine(model).run(asked), strict=True):
        same(one, other, model)
    assert engine.counters["out_of_memory"] == len(when) and engine._collector.bytes_held == 0


class Gasping(Engine):
    """Runs out of memory while drawing."""

    when, calls = (), 0

    def _sample(self, rows, logits):
        self.calls += logits is not None
        if logits is not None and self.calls in self.when:
            raise torch.OutOfMemoryError("no room for a softmax")
        super()._sample(rows, logits)


@pytest.mark.parametrize("when", [(1,), (4,), (2, 11)])
def test_out_of_memory_while_drawing_changes_no_token(when):
    model = model_of("llama")
    engine = Gasping(model, rows=6, chunk=8)
    engine.when = when
    asked = [replace(r, keep="bob", forced=(5, 6, 7) if i == 3 else None) for i, r in enumerate(requests(6))]
    replies = drain(engine, [engine.submit(request) for request in asked])
    for one, other in zip(replies, Engine(model).run(asked), strict=True):
        same(one, other, model)
