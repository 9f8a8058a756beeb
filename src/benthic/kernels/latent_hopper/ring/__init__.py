"""Tiles of latents on their way through a ring of quarters."""
