"""A model behind an API talks to a local one. Here the API is `transformers serve` with the embedded model.

pip install openai fastapi uvicorn
python examples/api_participant.py
"""

import socket
import subprocess
import sys
import time
import urllib.request

import torch

from interlens import APIParticipant, AutoModelParticipant, Conversation, SteeringSpec, UnsupportedIntervention
from interlens.dequantise import converted
from interlens.sources import embedded_file


def start_server(folder: str) -> tuple[subprocess.Popen, str]:
    """A server on this machine, and its base URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", folder]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(300):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).read()
            return process, f"http://127.0.0.1:{port}/v1"
        except OSError:
            if process.poll() is not None:
                break
            time.sleep(0.2)
    process.kill()
    raise SystemExit("transformers serve did not start; is 'transformers[serving]' installed?")


def main() -> None:
    folder = str(converted(embedded_file("smollm2"), label="smollm2"))
    server, url = start_server(folder)
    try:
        remote = APIParticipant("remote", folder, base_url=url, max_new_tokens=20, temperature=0.7)
        local = AutoModelParticipant.from_pretrained("smollm2", name="local", max_new_tokens=20, temperature=0.7)
        conversation = Conversation([remote, local], shared_context="Is cereal a soup? One sentence, please.")
        with conversation.capture(layers=[16]) as cache:
            conversation.run(turns=2)
        print(conversation.transcript.pretty())
        print(f"\ncaptured {len(cache)} record of 'local'; cannot look into {cache.skipped}")
        print(f"the API was used: {remote.usage}")
        try:
            conversation.step("remote", steering=SteeringSpec(torch.ones(2), layers=0))
        except UnsupportedIntervention as error:
            print(f"and it cannot be steered: {error}")
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
