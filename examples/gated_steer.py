"""An intervention of one's own: steer a token only where a probe says so.

The gate is the projection of the hidden state on a probe direction: where it exceeds a threshold, a direction is added;
elsewhere the state stays as it is. The class lives outside the package; the engine batches it like any other.

    python examples/gated_steer.py
"""

import hashlib
from dataclasses import dataclass, field

import torch

from interlens.engine import Request, Sampling, engine_for
from interlens.interp import CaptureSpec, Select
from interlens.loading import load


@dataclass(frozen=True)
class GatedSteer:
    """Adds `coef * direction` at `layers` to each selected token whose projection on `probe` exceeds `threshold`."""

    direction: torch.Tensor
    probe: torch.Tensor
    threshold: float
    layers: tuple[int, ...]
    coef: float = 1.0
    site: str = "residual"
    tokens: Select = field(default_factory=Select.generated)
    rank: int = 1
    per_position: bool = False

    @property
    def fingerprint(self) -> str:
        state = hashlib.blake2b(digest_size=16)
        for value in (self.direction, self.probe):
            state.update(value.float().numpy().tobytes())
        state.update(repr((self.threshold, self.layers, self.coef, self.site, str(self.tokens))).encode())
        return state.hexdigest()

    @property
    def edit_key(self):
        return "gated steer"

    def is_noop(self) -> bool:
        return self.coef == 0

    def check(self, num_layers: int, width: int) -> None:
        if self.direction.shape != (width,) or self.probe.shape != (width,):
            raise ValueError(f"direction and probe must have shape ({width},)")

    def required_positions(self, num_prompt: int) -> tuple[int, ...]:
        return ()

    def parameters(self, layer: int, positions, num_prompt: int | None = None) -> dict[str, torch.Tensor]:
        unit = self.probe / self.probe.norm()
        return {
            "offset": (self.coef * self.direction)[None],
            "probe": unit[None],
            "threshold": torch.tensor([self.threshold]),
        }

    def edit(self, hidden: torch.Tensor, parameters) -> torch.Tensor:
        score = (hidden.float() * parameters["probe"]).sum(-1)
        opened = (score > parameters["threshold"])[:, None]
        return torch.where(opened, hidden + parameters["offset"].to(hidden.dtype), hidden)

    def summary(self) -> dict:
        return {"mode": "gated", "layers": list(self.layers), "coef": self.coef, "threshold": self.threshold}


def main() -> None:
    model, tokenizer = load("smollm2")
    chat = [{"role": "user", "content": "Tell me about the sea."}]
    prompt = tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])
    generator = torch.Generator().manual_seed(0)
    width = model.config.hidden_size
    probe = torch.randn(width, generator=generator)
    direction = torch.randn(width, generator=generator)
    steers = [GatedSteer(direction, probe, threshold, (12,), coef=2.0) for threshold in (-1e9, 0.0, 1e9)]
    requests = [
        Request(
            tokens=prompt,
            sampling=Sampling(temperature=0, max_new_tokens=24),
            interventions=(steer,),
            capture=(CaptureSpec(layers=(12,), tokens=Select.generated()),),
        )
        for steer in (*steers,)
    ]
    plain = Request(tokens=prompt, sampling=Sampling(temperature=0, max_new_tokens=24))
    *steered, unsteered = engine_for(model).run([*requests, plain])
    for steer, reply in zip(steers, steered, strict=True):
        if reply.error:
            raise reply.error
        print(f"gate at {steer.threshold:g}: {tokenizer.decode(reply.tokens)!r}")
    print(f"no steering:   {tokenizer.decode(unsteered.tokens)!r}")
    assert steered[-1].tokens == unsteered.tokens, "a gate that never opens must change nothing"
    assert steered[0].tokens != unsteered.tokens, "a gate that always opens must change something"


if __name__ == "__main__":
    main()
