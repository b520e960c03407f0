"""One conversation per row of a JSONL file, all in the same batches, each with its own analysis.

python examples/rollout_rows.py
"""

import json
from pathlib import Path

from interlens import CaptureSpec, Conversation, Select, dataset_field

ROWS = Path(__file__).with_name("topics.jsonl")


def analyze(conversation: Conversation) -> dict:
    said = [m for m in conversation.transcript if "n_tokens" in m.metadata]
    return {
        "mood": conversation.row["mood"],
        "tokens": sum(m.metadata["n_tokens"] for m in said),
        "exclamations": sum(m.content.count("!") for m in said),
    }


def main() -> None:
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    conversation = Conversation.from_models(
        ("smollm2", "smollm2"),
        names=("alice", "bob"),
        shared_context=("Let's talk about ", dataset_field("topic"), "."),
        shared_system_prompt=lambda row: f"You are {row['mood']}. Answer in one sentence.",
        max_new_tokens=16,
    )
    spec = CaptureSpec(layers=(16,), tokens=Select.phase("answer"), pool="mean")
    report = conversation.rollout(data=rows, turns=2, seed=1, analyzer=analyze, capture=spec)
    for result in report:
        vectors = len(result.cache.records)
        print(f"{result.row['id']:>5}: {result.analysis}, {vectors} pooled vectors, {result.stop_reason}")
        print(f"       {result.transcript[-1].author}: {result.transcript[-1].content}")
    print(f"{len(report.failed)} failed")


if __name__ == "__main__":
    main()
