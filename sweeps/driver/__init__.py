"""Runs the units of a plan until each is closed by its commit."""
