"""Whole state dicts."""
