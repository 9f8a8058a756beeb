"""Prefill of many heads: long programs, with warps of their own for the gather."""
