"""Decode: many short programs, in which a few warps gather and the others multiply."""
