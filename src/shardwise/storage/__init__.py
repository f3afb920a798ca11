"""Folders and files that are written: complete or not at all, by one writer at a time. Nothing here imports torch."""
