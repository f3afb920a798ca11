"""The formats, each with all that is particular to it."""
