"""Who speaks: local models, APIs, scripts, people."""

from .api import APIParticipant, Prices, Usage
from .base import Participant
from .model import AutoModelParticipant, ModelParticipant
from .scripted import HumanParticipant, ScriptedParticipant

__all__ = [
    "APIParticipant", "AutoModelParticipant", "HumanParticipant", "ModelParticipant", "Participant", "Prices",
    "ScriptedParticipant", "Usage",
]  # fmt: skip
