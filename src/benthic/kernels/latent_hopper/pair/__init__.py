"""Prefill of up to 32 heads a program: two groups of warps that multiply."""
