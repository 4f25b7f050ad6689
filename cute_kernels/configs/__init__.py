"""Frozen dataclasses of what changes a kernel's code, their legality and the choice among them. Pure Python."""
