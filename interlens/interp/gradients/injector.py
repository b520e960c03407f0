"""Virtual tokens: vectors put in the place of placeholder tokens of a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from ...errors import HookDidNotFire
from ..sites import unwrap


class VirtualTokenInjector:
    """`n_soft` placeholder tokens to write into a prompt (`text`), whose embeddings `inject` replaces by vectors.

    placeholder: the text of one token that the tokenizer has and no prompt uses; by default one is chosen among its
    special tokens that the chat template does not use. Never the pad, stop or BOS token. ValueError if none will do.
    """

    def __init__(self, tokenizer: Any, n_soft: int, placeholder: str | None = None):
        if n_soft < 1:
            raise ValueError(f"n_soft must be at least 1, got {n_soft}")
        self.n_soft = n_soft
        candidates = [placeholder] if placeholder is not None else _candidates(tokenizer)
        reserved = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}
        for text in candidates:
            ids = tokenizer(text * n_soft, add_special_tokens=False)["input_ids"]
            if len(ids) == n_soft and len(set(ids)) == 1 and ids[0] not in reserved:
                self.text, self.token_id = text * n_soft, int(ids[0])
                return
        shown = f"{placeholder!r} is" if placeholder is not None else f"none of {len(candidates)} candidates is"
        raise ValueError(
            f"{shown} one token of its own, repeated, that is neither pad, stop nor BOS; pass placeholder="
        )

    @contextmanager
    def inject(self, model: nn.Module, vectors: Float[Tensor, "row soft width"]) -> Iterator[None]:
        """Within the block, forwards of `model` see `vectors` in place of the placeholders' embeddings. Gradients flow.

        vectors: [B, n_soft, D], or one row for all, in the space of the embedding module's output (Gemma: scaled).
        A forward must hold all placeholders of a row or none (decode steps). ValueError otherwise, HookDidNotFire if
        none was ever seen.
        """
        inner: Any = unwrap(model)
        embedding = inner.get_input_embeddings()
        vectors = vectors[None] if vectors.dim() == 2 else vectors
        if vectors.dim() != 3 or vectors.shape[1] != self.n_soft or vectors.shape[2] != embedding.weight.shape[1]:
            wanted = f"[B, {self.n_soft}, {embedding.weight.shape[1]}]"
            raise ValueError(f"vectors of shape {tuple(vectors.shape)}; they must be {wanted}")
        seen = []

        def hook(module, args, output):
            chosen = args[0] == self.token_id
            if not bool(chosen.any()):
                return None
            counts = chosen.sum(1).tolist()
            if set(counts) != {self.n_soft} or vectors.shape[0] not in (1, len(counts)):
                raise ValueError(
                    f"{len(counts)} rows hold {counts} placeholders, {vectors.shape[0]} rows of {self.n_soft} vectors "
                    "were given; each row needs them all"
                )
            seen.append(True)
            rows = vectors.expand(len(counts), -1, -1).to(output.device, output.dtype)
            return output.masked_scatter(chosen[..., None], rows)

        handle = embedding.register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()
        if not seen:
            raise HookDidNotFire(f"no forward held the placeholder {self.text!r}; put injector.text into the prompt")


def _candidates(tokenizer: Any) -> list[str]:
    """Special tokens that the chat template does not use, then rare vocabulary entries from the end."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    special = [str(token) for token in tokenizer.all_special_tokens + list(tokenizer.get_added_vocab())]
    special = [token for token in dict.fromkeys(special) if token not in template]
    last = sorted(tokenizer.get_vocab().values())[-200:]
    return special + [text for index in reversed(last) if (text := tokenizer.decode([index])).strip()]
