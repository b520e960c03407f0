"""An API participant against a real server: `transformers serve` with the embedded model."""

import pytest

pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from interlens import APIParticipant, AutoModelParticipant, Conversation
from tests.support.serving import transformers_server


@pytest.mark.slow
def test_a_real_server_is_fed_what_a_local_model_would_be(smol):
    folder = smol.name_or_path
    local = AutoModelParticipant.from_pretrained(
        folder, name="remote", max_new_tokens=12, temperature=0.0, load_options={"dtype": "float32", "device": "cpu"}
    )
    with transformers_server(folder) as url:
        remote = APIParticipant("remote", folder, base_url=url, max_new_tokens=12, temperature=0.0, timeout_s=120)
        there = Conversation([remote], shared_context="Is cereal a soup?", shared_system_prompt="Answer briefly.")
        there.run(turns=1)
    here = Conversation([local], shared_context="Is cereal a soup?", shared_system_prompt="Answer briefly.")
    here.run(turns=1)
    theirs, ours = there.transcript[1], here.transcript[1]
    assert theirs.content == ours.content
    assert theirs.metadata["n_prompt_tokens"] == ours.metadata["n_prompt_tokens"]
