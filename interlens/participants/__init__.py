"""Who speaks: local models, APIs, scripts, people."""

from .base import Participant
from .model import AutoModelParticipant, ModelParticipant

__all__ = ["AutoModelParticipant", "ModelParticipant", "Participant"]
