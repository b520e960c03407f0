"""Runs units with models: settings, turns, patches, judges."""
