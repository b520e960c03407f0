"""Many generators of turns at once.

The scheduler knows nothing of conversations. A *job* is any generator of `turns.Work`; usually it is written with
`yield from conversation.turn(...)`, as many turns as wanted. All jobs' requests meet in the same engines, so they are
decoded in the same batches; `Ask`s wait in threads meanwhile. A job's exception ends that job only.

How a sweep runs a trunk and then its branches:

    def play(conversation, turns, record):              # the job: one trunk, or one branch
        for speaker in turns:
            turn = yield from conversation.turn(speaker, steering=..., capture=...)   # TurnOptions' fields as keywords
            record(turn.index, turn.message, turn.records)      # turn.message.fed: prompt, generated, phases, layout
        return conversation

    trunk = Conversation(participants, shared_context=..., seed=0)   # seed and key make the noise:
    trunk.key = (item_id, trunk_seed)                                # (seed, key, generated turns so far, call)
    scheduler = Scheduler()
    scheduler.add(play(trunk, ["alice", "bob"], ...), tag=("trunk", trunk_id))
    for done in scheduler:                     # Outcomes in order of finishing; jobs may be added in the loop
        if done.error is not None:             # only this job failed; done.traceback is text
            ...
        elif done.tag[0] == "trunk":
            for condition, branch_seed in ...:
                branch = done.value.branch()                         # shares the weights and nothing else
                branch.key = (item_id, trunk_seed, branch_seed)      # never the condition: conditions meet one noise
                branch.branch_start = len(branch.transcript)         # index of the first message after the trunk
                branch.transcript.append(branch.moderator_name, framing)
                scheduler.add(play(branch, ["alice", "bob"], ...), tag=("cell", cell_id))

A trunk that is read back instead of run:

    trunk.transcript.append(Message(author, content, metadata, fed=Fed(generated=tokens, phases=phases,
                                                                       template_hash=stored_hash)))
    trunk.turns_taken = n           # generated turns so far: the `message` of the noise key goes on from there

From then on `tokens` are fed verbatim wherever that participant's own turn is rendered; only text of others is
tokenised. `Fed.prompt` and `Fed.layout` may stay empty. Message 0 is appended by the constructor when `shared_context`
is given, so restore the messages after it. A participant with another tokenizer or template than
`Fed.template_hash` renders the content as text instead.

Metadata says what was in force (`finish_reason`, `n_tokens`, `steering`, ...). Records go only to `Turn.records` when
asked for by `capture=`; keep none of them on the conversation. `Scheduler.add` never runs anything by itself; leaving
the loop early (or `close()`) cancels what is in flight.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .work import Ask, Generate, Steps


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one job ended: with `value`, or with `error`."""

    tag: Any
    value: Any = None
    error: BaseException | None = None
    traceback: str | None = None


@dataclass
class _Job:
    steps: Steps
    tag: Any


class Scheduler:
    """Runs jobs over the engines of their participants. Iterate to run; see the module's docstring.

    `max_live`: at most this many jobs are started and unfinished (None: all). `threads`: Asks in flight at once.
    `tick` is called before every step; what it raises ends the loop, as leaving it early does.
    """

    def __init__(self, *, max_live: int | None = None, threads: int = 64, tick: Callable[[], None] | None = None):
        self.max_live = max_live
        self._tick = tick
        self._waiting: deque[_Job] = deque()
        self._done: deque[Outcome] = deque()
        self._tickets: dict[int, tuple[Any, Any, _Job]] = {}  # id -> (engine, ticket, job)
        self._answers: queue.SimpleQueue = queue.SimpleQueue()
        self._asking = 0
        self._threads = threads
        self._workers: _Workers | None = None

    def add(self, steps: Steps, tag: Any = None) -> None:
        """Queue a job. Jobs start in the order added, when the loop next turns."""
        self._waiting.append(_Job(steps, tag))

    @property
    def live(self) -> int:
        """Jobs started and unfinished."""
        return len(self._tickets) + self._asking

    def __iter__(self) -> Iterator[Outcome]:
        try:
            while True:
                self._start()
                while self._done:
                    yield self._done.popleft()
                    self._start()
                if not self.live and not self._waiting:
                    return
                self._advance()
        finally:
            self.close()

    def close(self) -> None:
        """Cancel what is in flight. Idempotent."""
        for engine, ticket, job in self._tickets.values():
            engine.cancel(ticket)
            job.steps.close()
        self._tickets.clear()
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    # -- inside -----------------------------------------------------------------------------------------------------
    def _start(self) -> None:
        while self._waiting and (self.max_live is None or self.live < self.max_live):
            self._resume(self._waiting.popleft(), None)

    def _resume(self, job: _Job, value: Any = None, error: BaseException | None = None) -> None:
        """Let a job go on to its next Work, or to its end."""
        try:
            work = job.steps.send(value) if error is None else job.steps.throw(error)
            if isinstance(work, Generate):
                engine = work.participant.engine
                ticket = engine.submit(work.request)
                self._tickets[id(ticket)] = (engine, ticket, job)
            elif isinstance(work, Ask):
                self._ask(job, work)
            else:
                raise TypeError(f"a job yields Generate or Ask, not {type(work).__name__}")
        except StopIteration as stop:
            self._done.append(Outcome(tag=job.tag, value=stop.value))
        except (Exception, SystemExit) as failure:
            self._done.append(Outcome(tag=job.tag, error=failure, traceback=traceback.format_exc()))

    def _ask(self, job: _Job, work: Ask) -> None:
        if self._workers is None:
            self._workers = _Workers(self._threads)
        self._asking += 1
        alone = not (self._tickets or self._waiting or self._tick or self._asking > 1)

        def run():
            try:
                answer = (job, work.call(), None)
            except BaseException as failure:
                answer = (job, None, failure)
            self._answers.put(answer)

        if alone:  # nothing could go on meanwhile: no thread, so that a person can be asked in a notebook
            run()
        else:
            self._workers.submit(run)

    def _advance(self) -> None:
        """One step of every engine with requests of ours, then hand out whatever has been answered."""
        if self._tick is not None:
            self._tick()
        engines = {id(engine): engine for engine, _, _ in self._tickets.values()}
        moved = [engine.step() for engine in engines.values()]
        ready = [(ref, ticket) for ref, (_, ticket, _) in self._tickets.items() if ticket.reply is not None]
        for ref, ticket in ready:
            job = self._tickets.pop(ref)[2]
            self._resume(job, ticket.reply)
        # wait for threads only when no engine has anything to do
        block = not ready and not any(moved)
        while self._asking:
            try:
                job, value, error = self._answers.get(timeout=0.05) if block else self._answers.get_nowait()
            except queue.Empty:
                break
            block = False
            self._asking -= 1
            self._resume(job, value, error)
        if block and not self._asking and self._tickets:
            time.sleep(0.0002)  # somebody else is stepping our engine


class _Workers:
    """Up to `limit` threads, started as needed. Daemons: a call that hangs never keeps the process from ending."""

    def __init__(self, limit: int):
        self.limit, self.threads, self.queued = limit, 0, 0
        self.calls: queue.SimpleQueue = queue.SimpleQueue()
        self.lock, self.closed = threading.Lock(), False

    def submit(self, call: Callable[[], None]) -> None:
        with self.lock:
            self.queued += 1
            start = self.queued > self.threads and self.threads < self.limit
            self.threads += start
        self.calls.put(call)
        if start:
            threading.Thread(target=self._work, daemon=True, name="interlens-ask").start()

    def _work(self) -> None:
        while (call := self.calls.get()) is not None:
            if not self.closed:
                call()
            with self.lock:
                self.queued -= 1

    def close(self) -> None:
        """Start nothing more; what has begun is left to end by itself."""
        self.closed = True
        for _ in range(self.threads):
            self.calls.put(None)


def drive(jobs: Iterable[Steps], *, max_live: int | None = None, threads: int = 64) -> list[Outcome]:
    """Run jobs to their ends. Outcomes in the order of `jobs`, tagged with their index."""
    scheduler = Scheduler(max_live=max_live, threads=threads)
    for i, job in enumerate(jobs):
        scheduler.add(job, tag=i)
    return sorted(scheduler, key=lambda outcome: outcome.tag)


def finish(steps: Steps) -> Any:
    """Run one job alone; returns its value or raises its error."""
    (outcome,) = drive([steps])
    if outcome.error is not None:
        raise outcome.error
    return outcome.value
