"""Prefill: long programs, with warps of their own for the gather."""
