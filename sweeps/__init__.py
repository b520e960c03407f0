"""Thousands of conversations on Ray: one config in, one folder out."""
