"""Reusable @cute.jit pieces, named by what they compute."""
