"""Who speaks: local models, APIs, scripts, people."""

from .base import Participant
from .model import AutoModelParticipant, ModelParticipant
from .scripted import HumanParticipant, ScriptedParticipant

__all__ = ["AutoModelParticipant", "HumanParticipant", "ModelParticipant", "Participant", "ScriptedParticipant"]
