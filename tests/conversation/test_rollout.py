"""Many conversations together are each one alone."""

import subprocess
import sys
import threading
import time

import numpy
import pytest

import interlens
from interlens import Conversation, Message, ScriptedParticipant, dataset_field
from interlens.participants import Participant
from interlens.scheduler import Scheduler, drive
from interlens.work import Ask
from tests.support.scripted import engine, speaker
from tests.support.tokenizers import family


def pair(**options):
    tokenizer = family("chatml")
    return Conversation([speaker("alice", tokenizer), speaker("bob", tokenizer)], **options)


def test_a_rollout_is_each_conversation_alone():
    conversation = pair(shared_context="Talk.")
    conversation.step("alice")
    report = conversation.rollout(5, seed=3, turns=3, until=interlens.StopStringCondition(["7 now"]))
    for i, result in enumerate(report):
        alone = conversation.branch()
        alone.seed, alone.key = 3, i
        alone.run(turns=3, until=interlens.StopStringCondition(["7 now"]))
        assert alone.transcript == result.transcript and alone.stop_reason == result.stop_reason
    assert len({r.transcript[-1].content for r in report}) == 5 and len(conversation.transcript) == 2
    assert (
        conversation.rollout(2, seed=3, turns=3).transcripts()
        == conversation.rollout(4, seed=3, turns=3).transcripts()[:2]
    )


def test_rows_fill_every_text_and_reach_the_analyzer():
    tokenizer = family("chatml")
    alice = speaker("alice", tokenizer, system_prompt=("You are ", dataset_field("who"), "."))
    conversation = Conversation([alice, speaker("bob", tokenizer)], shared_context=lambda row: f"Topic: {row['topic']}")
    for begin in (
        lambda c: c.step("alice"), lambda c: c.run(turns=1, prompt="Go."), lambda c: c.rollout(1, turns=1).failed[0],
    ):  # fmt: skip
        with pytest.raises(ValueError, match="data row"):
            raise begin(conversation).error
    assert not conversation.transcript
    with pytest.raises(ValueError, match="a conversation is given twice"):
        interlens.run([conversation, conversation], turns=1)
    rows = [{"who": "a cook", "topic": "soup"}, {"who": "a judge", "topic": "law"}]
    report = conversation.rollout(
        data=rows, turns=1, analyzer=lambda c: {"topic": c.row["topic"], "n": len(c.transcript)}
    )
    assert report.analyses() == [{"topic": "soup", "n": 2}, {"topic": "law", "n": 2}]
    assert [t[0].content for t in report.transcripts()] == ["Topic: soup", "Topic: law"]
    assert "You are a judge." in report.results[1].conversation.render_templated("alice")
    again = conversation.rollout(3, data=rows, turns=1)
    assert [r.row["topic"] for r in again] == ["soup", "law", "soup"]
    with pytest.raises(ValueError, match="no column 'mood'"):
        Conversation([alice], shared_context=dataset_field("mood")).rollout(data=rows, turns=1)


class Fails(Participant):
    def __init__(self, name, error):
        super().__init__(name)
        self.error = error

    def reply(self, view, request):
        if request.key[1] == 1:
            raise self.error
        return Message(self.name, "Fine.")


@pytest.mark.parametrize("error", [RuntimeError("boom in the middle"), SystemExit("boom in the middle")])
def test_one_conversation_fails_alone_with_its_traceback(error):
    conversation = Conversation([speaker("alice", family("chatml")), Fails("bob", error)], shared_context="Talk.")
    report = conversation.rollout(3, turns=3, analyzer=lambda c: {"n": 1})
    assert [r.index for r in report.failed] == [1] and report.analyses() == [{"n": 1}, None, {"n": 1}]
    failed = report.failed[0]
    assert "boom in the middle" in failed.traceback and failed.stop_reason == "error" and len(failed.transcript) == 2
    assert all(len(r.transcript) == 4 for r in report if r.error is None)
    numbers = conversation.rollout(1, turns=1, analyzer=lambda c: {"n": numpy.int64(2), "x": numpy.float32(0.5)})
    assert numbers.analyses() == [{"n": 2, "x": 0.5}]
    bad = conversation.rollout(1, turns=1, analyzer=lambda c: {"t": c.transcript})
    assert "an analyzer gives a dict" in str(bad.failed[0].error)


def test_an_engine_error_is_raised_alone_and_recorded_in_a_rollout():
    def answer(request, tokenizer):
        return ValueError("no layer 99") if request.key[1] in (None, 1) else "Yes."

    conversation = Conversation([speaker("alice", family("chatml"), answer)], shared_context="Talk.")
    with pytest.raises(ValueError, match="no layer 99"):
        conversation.step("alice")
    assert len(conversation.transcript) == 1
    assert [type(r.error) for r in conversation.rollout(3, turns=1)] == [type(None), ValueError, type(None)]


def test_threads_wait_while_local_rows_go_on():
    release, stepped = threading.Event(), []

    class Slow(Participant):
        def reply(self, view, request):
            assert release.wait(10)
            return Message(self.name, "At last.")

    local = speaker("alice", family("chatml"))
    local.engine.answer = lambda request, tokenizer: "words " * 30
    step = local.engine.step

    def counted():
        stepped.append(1)
        if len(stepped) == 20:
            release.set()
        return step()

    local.engine.step = counted
    report = interlens.run([Conversation([Slow("s")]), Conversation([local], shared_context="Go.")], turns=1)
    assert not report.failed and len(stepped) >= 20


def test_every_conversation_shares_batches():
    tokenizer = family("chatml")
    shared = engine(tokenizer, lambda request, tokenizer: "four tokens and more")
    conversation = Conversation([speaker("alice", tokenizer)], shared_context="Go.")
    conversation.participants[0].weights._engine = shared
    widths = []
    step = shared.step
    shared.step = lambda: widths.append(len(shared.live)) or step()
    conversation.rollout(16, turns=2)
    assert max(widths) == 16 and len(widths) < 60


def test_jobs_may_be_added_while_others_run_and_max_live_holds():
    live = []

    def job(n):
        live.append(n)
        yield Ask(participant=None, call=lambda: time.sleep(0.005))
        live.remove(n)
        assert len(live) < 3
        return n

    scheduler = Scheduler(max_live=3)
    for n in range(6):
        scheduler.add(job(n), tag=n)
    done = []
    for outcome in scheduler:
        done.append(outcome.value)
        if outcome.value < 6:
            scheduler.add(job(outcome.value + 10), tag="more")
    assert sorted(done) == [*range(6), *range(10, 16)]


def test_leaving_early_cancels():
    tokenizer = family("chatml")
    conversation = Conversation([speaker("alice", tokenizer)], shared_context="Go.")
    live = conversation.participants[0].engine.live
    scheduler = Scheduler()
    scheduler.add(conversation.play(turns=50))
    scheduler.add(iter_once())
    for _ in scheduler:
        break
    assert not conversation.participants[0].engine.live and live is not None and len(conversation.transcript) < 50


def test_a_call_that_hangs_does_not_keep_the_process():
    script = (
        "import time\nfrom interlens.scheduler import Scheduler\nfrom interlens.work import Ask\n"
        "def job(seconds):\n    yield Ask(participant=None, call=lambda: time.sleep(seconds))\n"
        "scheduler = Scheduler()\n"
        "for seconds in (0, 600):\n    scheduler.add(job(seconds))\n"
        "for outcome in scheduler:\n    break\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def iter_once():
    return "at once"
    yield


def test_drive_keeps_order_and_wrong_work_is_an_error():
    def wrong():
        yield "work"

    outcomes = drive([iter_once(), wrong(), iter_once()])
    assert [o.value for o in outcomes] == ["at once", None, "at once"] and "Generate or Ask" in str(outcomes[1].error)


def test_scripts_talk_without_an_engine():
    report = Conversation([ScriptedParticipant("a", ["hi"]), ScriptedParticipant("b", ["ho"])]).rollout(100, turns=4)
    assert not report.failed and {len(t) for t in report.transcripts()} == {4}
