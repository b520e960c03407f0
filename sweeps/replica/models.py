"""The models and API connections of one replica, each loaded once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from interlens import loading
from interlens.engine import engine_for
from interlens.loading import weights_hash
from interlens.participants import APIParticipant
from interlens.participants.api import Prices

from ..config.digest import digest
from ..config.schema import JudgeConfig, ParticipantConfig, SweepConfig
from ..plan import model_sizes

if TYPE_CHECKING:
    from interlens.loading import Loaded


class Models:
    """The models of one cast, each loaded once."""

    def __init__(self, config: SweepConfig):
        self._config = config
        self._loaded: dict[str, Loaded] = {}
        self._apis: dict[tuple, APIParticipant] = {}
        self._lock = threading.Lock()
        self._told = 0.0

    def of(self, config: SweepConfig, participant: ParticipantConfig) -> Loaded:
        """The model of a local participant, with its adapter attached."""

        entry = model_sizes.model(config, participant.model or "")
        adapter = entry.adapters.get(participant.adapter, participant.adapter) if participant.adapter else None
        loaded = loading.load(
            entry.source, dtype=None if entry.dtype == "auto" else entry.dtype, revision=entry.revision,
            adapter=adapter, device=None if entry.device == "auto" else entry.device,
        )  # fmt: skip
        name = model_sizes.model_name(config, participant.model or "")
        if name not in self._loaded:
            engine_for(loaded.model).rows = self._config.cluster.rows
            self._loaded[name] = loaded
        return loaded

    def api(self, name: str, given: ParticipantConfig | JudgeConfig, **options: Any) -> APIParticipant:
        """An API participant; those of one model share their connection, its limit in flight and what they used."""

        key = (given.provider or "openai", given.model, given.base_url)
        with self._lock:
            if key not in self._apis:
                told = given.prices
                prices = Prices(prompt=told.prompt, completion=told.completion) if told else None
                self._apis[key] = APIParticipant(
                    name, given.model or "", provider=key[0], base_url=given.base_url, prices=prices,
                    max_in_flight=given.max_in_flight, timeout_s=given.timeout_s,
                )  # fmt: skip
            made = self._apis[key].clone()
        for option, value in {"name": name, **options}.items():
            setattr(made, option, value)
        return made

    def stop(self) -> None:
        """Ask no API any more."""
        for api in self._apis.values():
            api.stop()

    @property
    def cost(self) -> float:
        """Dollars that API participants have used so far, failed cells included."""
        return sum(api.usage.cost for api in list(self._apis.values()))

    def newly_spent(self) -> float:
        """Dollars since this was last asked."""
        with self._lock:
            before, self._told = self._told, self.cost
            return self._told - before

    def facts(self) -> dict[str, dict[str, str]]:
        """Model name -> hashes of its weights and chat template, and its dtype."""

        return {
            name: {
                "weights": weights_hash(loaded.model), "dtype": loaded.dtype,
                "template": digest(getattr(loaded.tokenizer, "chat_template", None) or ""),
            }
            for name, loaded in self._loaded.items()
        }  # fmt: skip
