"""Gradients through a model: forwards that keep them, log-probabilities of continuations, soft tokens."""
