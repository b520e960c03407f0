"""One engine per loaded model: every turn of every conversation goes through it.

A step reads as four verbs. **Admit** waiting requests into free rows; **forward** a chunk of a prefill group, then one
token for every live row; **sample** with each row's own noise; **retire** rows that are finished. Rows of any length,
age, sampling settings, interventions and captures live in one batch.

Invariants:
* `run` and `submit` never raise for a request: what goes wrong with it is its reply's error, and its neighbours go on.
* No hook outlives a forward. A forward that fails half-way has written only columns that are written again.
* One lock per model: whoever steps, steps for all; many threads may submit and run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from ..errors import HookDidNotFire
from ..interp import attach, hooks
from ..interp.logprobs import logprob_rows
from . import diagnose, taps
from .collect import Collector
from .forward import Batch, Forward, is_out_of_memory
from .memory import Memory
from .offload import Mover
from .request import Reply, Request
from .resolve import reply_of, resolve, unreached
from .rows import ROW_COUNTERS, Row, Ticket
from .sampling import draw
from .slabs import Slabs
from .table import Table

COUNTERS = (*ROW_COUNTERS, "pad_tokens", "requests", "errors", "steps", "admissions", "requeued", "out_of_memory")


class Engine:
    """Batched decoding of one model with per-row interventions and capture.

    rows: most sequences alive at once (default 32 on a CPU, 128 on a GPU). chunk: longest piece of a prefill, in
    tokens. budget: KV columns (one position of one row, all layers) that slabs and parked prefixes may take; None:
    from the memory that is free. reuse: park KV and share prefixes. exact: attention of the engine's own, which gives a
    row the same bits in any batch (bfloat16 on CPUs; docs/engine.md says where that was seen to hold).
    """

    def __init__(
        self, model, *, rows: int | None = None, chunk: int = 512, budget: int | None = None, reuse: bool = True,
        exact: bool = False,
    ):  # fmt: skip
        for name, value in (("rows", rows), ("chunk", chunk), ("budget", budget)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.model = model
        self.rows = rows or (128 if next(model.parameters()).device.type == "cuda" else 32)
        self.chunk = chunk
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self.reports: list[str] = []
        """One line for each thing a user should know: memory that ran out, a family that cannot share prefixes."""
        self.memory = Memory()
        self.slabs = Slabs()
        self._forward = Forward(model)
        if exact:
            self._forward.keep_rows_apart()
        if not self._forward.forkable:
            self.rows, self.chunk, reuse = 1, 1 << 30, False
            self.reports.append(
                f"{type(model).__name__} keeps a state that cannot be cut or copied (linear attention, SSM): its rows "
                "run one at a time and every prompt is computed from its start"
            )
        self._table = Table(self.slabs, self.memory, budget or self._forward.free_columns(), reuse)
        self._collector = Collector(Mover(self._forward.device))
        self._edit_tables = taps.Tables()
        self._waiting: deque[Row] = deque()
        self._unfinished: dict[Ticket, Row] = {}
        self._torn = False
        """A step has begun and not ended."""
        self._lock = attach.lock_of(model)

    def __reduce__(self):
        """A copied or pickled model leaves its engine behind: the copy gets one of its own."""
        return type(None), ()

    # Submitting

    def submit(self, request: Request) -> Ticket:
        """Queue a request. An impossible one is answered at once, with the error on its reply."""
        ticket = Ticket(request)
        with self._lock:
            self.counters["requests"] += 1
            try:
                self._forward.check_registered()
                row = resolve(self._forward, ticket)
                self._unfinished[ticket] = row
                self._waiting.append(row)
            except Exception as error:
                self.counters["errors"] += 1
                ticket.reply = Reply(finish_reason="error", error=error)
        return ticket

    def run(self, requests: Sequence[Request]) -> list[Reply]:
        """Replies in order. Never raises for a request. Interrupted (Ctrl-C), it cancels them."""
        tickets = [self.submit(request) for request in requests]
        try:
            while any(ticket.reply is None for ticket in tickets):
                self.step()
        except BaseException:
            for ticket in tickets:
                self.cancel(ticket)
            raise
        return [ticket.reply for ticket in tickets if ticket.reply is not None]

    def cancel(self, ticket: Ticket) -> None:
        """Stop a request at the next step; its reply says so, with the tokens it has so far."""
        ticket.cancelled = True

    def forget(self, names: Iterable[str] | None = None) -> None:
        """Free parked KV, of these participants or of all."""
        with self._lock:
            self.memory.forget(names)

    @property
    def live(self) -> list[Row]:
        """Rows that decode now."""
        return self._table.live

    def bytes_held(self) -> int:
        """Bytes of unpooled activations held for rows that are not finished."""
        return self._collector.bytes_held

    def rewind(self) -> None:
        """Every unfinished row starts over from the tokens it has, nothing is parked; done by itself after a step that was
        interrupted anywhere (Ctrl-C)."""
        with self._lock, torch.inference_mode(False):
            self.memory, self.slabs = Memory(), Slabs()
            self._table = Table(self.slabs, self.memory, self._table.budget, self._table.reuse)
            self._collector = Collector(Mover(self._forward.device))
            self._edit_tables = taps.Tables()
            rows = [row for ticket, row in self._unfinished.items() if ticket.reply is None]
            for row in rows:
                row.start_over()
                row.kept = None
            self._waiting = deque(rows)
            self.counters["requeued"] += len(rows)
            self._torn = False

    # The step

    def step(self) -> bool:
        """Admit, forward, sample, retire. False when there is nothing to do."""
        with self._lock, torch.inference_mode(False), torch.autocast(self._forward.device.type, enabled=False):
            if self._torn:
                self.rewind()
            if not (self._waiting or self._table.live or self._table.groups):
                return False
            self.counters["steps"] += 1
            self._torn = True
            try:
                self._admit()
                for feed in (self._prefill, self._decode):
                    rows, logits = feed()
                    self._sample(rows, logits)
                    self._retire()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._shrink(error)
            self._torn = False
            return True

    def _admit(self) -> None:
        """Move waiting requests into free rows, once enough rows are free to make it worth while."""
        for row in [row for row in self._waiting if row.ticket.cancelled]:
            self._waiting.remove(row)
            self._fail(row, RuntimeError("cancelled"))
            self._answer(row)
        free = self.rows - self._table.end
        if not self._waiting or free < min(max(1, self.rows // 8), len(self._waiting)):
            return
        chosen = self._table.choose(self._waiting, free)
        if chosen:
            self.counters["admissions"] += 1
            try:
                self._table.place(chosen)
            except Exception as error:
                lost = self._table.put_back(chosen)
                self._waiting.extendleft(reversed(lost))
                if not is_out_of_memory(error):
                    raise
                self._shrink(error, lost)

    def _prefill(self) -> tuple[list[Row], Tensor | None]:
        """Feed a chunk of the first group; its rows and their last logits once they are complete.

        Rows of a group end together: a shorter row is padded at its start.
        """
        if not self._table.groups:
            return [], None
        group = self._table.groups[0]
        left = max(row.target - row.fed for row in group)
        if not left:
            self._table.join()
            return [], None
        after = max(0, left - self.chunk)
        rows = [row for row in group if row.target - row.fed > after]
        stops = [row.target - after for row in rows]
        logits = self._feed(rows, [row.fed for row in rows], stops)
        if after:
            return [], None
        self._table.join()
        return rows, logits

    def _decode(self) -> tuple[list[Row], Tensor | None]:
        """Feed every live row its last token."""
        table = self._table
        fits = table.overflow()
        if fits is not None:
            self._requeue(min(fits, len(table.live)))
            if len(table.live) == 1 and table.overflow() is not None:
                row = table.live[0]
                message = f"{len(row.sequence)} columns for one row do not fit the budget of {table.budget}; "
                self._fail(row, MemoryError(f"{message}give the engine a larger budget or shorten the context"))
                self._retire()
        rows = list(table.live)
        if not rows:
            return [], None
        table.reserve(table.end, max(len(row.sequence) for row in rows))
        return rows, self._feed(rows, [row.fed for row in rows], [len(row.sequence) for row in rows])

    def _feed(self, rows: list[Row], starts: list[int], stops: list[int]) -> Tensor:
        """One forward of rows that stand side by side. Rows whose own code or site fails are marked and run plain."""
        while True:
            batch = Batch(
                first=rows[0].index, ids=[row.sequence.ids for row in rows], starts=starts, stops=stops,
                floors=[row.written for row in rows], adapters=[row.request.adapter for row in rows],
                all_logits=any(row.needs_all_logits for row in rows), least=self._forward.least_queries,
            )  # fmt: skip
            functions, lanes = taps.build(rows, batch, self._edit_tables)
            try:
                self._forward.check_model()
                self._forward.check_registered()
                with hooks.attached(self.model, functions) if functions else nullcontext():
                    logits = self._forward(batch, self.slabs)
                self._forward.check_registered()
                break
            except taps.EditFailed as failed:
                failures, broken = failed.failures, False
            except HookDidNotFire as error:
                failures, broken = dict.fromkeys([row for row in rows if row.touches(error.missing)], error), False
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                failures, broken = dict.fromkeys(rows, error), True
            for row, error in failures.items():
                self._fail(row, error)
            if broken:
                for row, stop in zip(rows, stops, strict=True):
                    row.fed = stop
                return torch.zeros(len(rows), self._forward.vocab_size)
        self._collector.commit(lanes)
        self._account(rows, batch)
        if batch.all_logits:
            self._forced_logprobs(rows, batch, logits)
        return logits[:, -1]

    def _account(self, rows: list[Row], batch: Batch) -> None:
        longest = max(stop - start for start, stop in zip(batch.starts, batch.stops, strict=True))
        decoding = longest == 1 and all(row in self._table.live for row in rows[:1])
        for row, start, stop in zip(rows, batch.starts, batch.stops, strict=True):
            row.note_fed(start, stop, decoding)
            self.counters["pad_tokens"] += batch.num_queries - (stop - start)

    def _forced_logprobs(self, rows: list[Row], batch: Batch, logits: Tensor) -> None:
        """Of teacher-forced tokens: the logits of position p score the token at p + 1."""
        for b, row in enumerate(rows):
            first = max(batch.starts[b], row.sequence.num_prompt - 1)
            last = min(batch.stops[b], len(row.sequence) - 1)
            if not row.wants_forced_logprobs or last <= first or row.error is not None:
                continue
            offset = batch.num_queries - batch.stops[b]
            scores = logits[b, first + offset : last + offset]
            if not torch.isfinite(scores.amax(-1)).all():
                self._fail(row, diagnose.not_finite(self._forward, row))
                continue
            ids = torch.tensor(row.sequence.ids[first + 1 : last + 1], device=logits.device)
            row.note_logprobs(*logprob_rows(scores, ids), None)

    def _sample(self, rows: list[Row], logits: Tensor | None) -> None:
        """Draw the next token of every row that wants one; a row that wants none has now been fed to its end."""
        if logits is None:
            return
        largest = logits.amax(-1)
        for i in (~torch.isfinite(largest)).nonzero()[:, 0].tolist():
            if rows[i].error is None:
                self._fail(rows[i], diagnose.not_finite(self._forward, rows[i]))
        drawing = []
        for i, row in enumerate(rows):
            if row.error is None and row.finish_reason is None:
                drawing.append(i)
            else:
                row.done = True
        if not drawing:
            return
        part = logits if len(drawing) == len(rows) else logits[drawing]
        chosen = [rows[i] for i in drawing]
        wanted = [i for i, row in enumerate(chosen) if row.request.logprobs]
        drawn = draw(
            part,
            [row.request.sampling for row in chosen],
            [row.noise.at(row.num_drawn) for row in chosen],
            logprobs=bool(wanted),
        )
        if wanted:
            ids = torch.tensor([drawn.tokens[i] for i in wanted], device=part.device)
            logprobs, entropy = logprob_rows(part[wanted], ids)
            for n, i in enumerate(wanted):
                chosen[i].note_logprobs(logprobs[n : n + 1], entropy[n : n + 1], drawn.sampling_logprobs[i])
        for row, token in zip(chosen, drawn.tokens, strict=True):
            row.append(token)

    def _retire(self) -> None:
        """Answer every finished row and free its place."""
        for row in [row for row in self._table.live if row.ticket.cancelled and not row.done]:
            self._fail(row, RuntimeError("cancelled"))
        gone = [row for row in self._table.live if row.done or row.error is not None]
        for row in gone:
            if row.error is None and (message := unreached(row)):
                self._fail(row, ValueError(message))
            records = self._collector.records(row)  # before it leaves: out of memory here, it starts over
            self._table.leave(row, keep=row.request.keep if row.reply is None else None)
            row.records += records
            self._answer(row)
        if any(row.error is not None for row in gone):
            self._table.scrub()

    # Answers

    def _fail(self, row: Row, error: BaseException) -> None:
        """Mark a row; it goes on in its batch without edits and captures until it is retired."""
        self._collector.drop(row)
        row.error, row.finish_reason, row.edits, row.takes, row.clean_takes = error, "error", (), (), ()
        self.counters["errors"] += 1

    def _answer(self, row: Row) -> None:
        """Reply to a finished row's ticket, or send the second row that its clean captures need."""
        for name in ROW_COUNTERS:
            self.counters[name] += row.counters[name]
        reply = row.reply
        if reply is None:
            reply = reply_of(row)
        else:
            reply.counters = {name: reply.counters[name] + row.counters[name] for name in ROW_COUNTERS}
        reply.records = [record for _, record in sorted(row.records, key=lambda each: each[0])]
        reply.finish_reason, reply.error = row.finish_reason or "stop", row.error
        if row.clean_takes and row.error is None:
            follower = row.clean_follower(reply)
            self._unfinished[row.ticket] = follower
            self._waiting.appendleft(follower)
        else:
            row.ticket.reply = reply
            del self._unfinished[row.ticket]

    # Memory

    def _requeue(self, keep: int) -> None:
        """All but `keep` live rows start over from the tokens they have; their noise goes on where it was."""
        removed = self._table.evacuate(keep)
        for row in removed:
            self._collector.drop(row)
        self.counters["requeued"] += len(removed)
        self._waiting.extendleft(reversed(removed))

    def _shrink(self, error: BaseException, waiting: Sequence[Row] = ()) -> None:
        """Out of memory: free what is parked and spare, halve the rows, remember the smaller size, say so.

        waiting: rows for which there was no place.
        """
        table = self._table
        self.counters["out_of_memory"] += 1
        had = max(1, table.end + len(waiting))
        spare = self.slabs.num_rows > 1 or len(self.memory) > 0
        rows = [*table.live, *table.prefilling, *waiting]
        self.memory.forget()
        # Whatever was half done (a capture, a draw) is done again: all rows start over, and no slab has to be copied.
        self._requeue(0)
        if self._forward.device.type == "cuda":
            torch.cuda.empty_cache()
        if had == 1 and not spare:
            for row in rows:
                self._waiting.remove(row)
                self._fail(row, MemoryError(f"out of memory with a single row of {len(row.sequence)} tokens: {error}"))
                self._answer(row)
            return
        self.rows = max(1, had // 2)
        self.reports.append(f"out of memory at {had} rows: going on with {self.rows}")
