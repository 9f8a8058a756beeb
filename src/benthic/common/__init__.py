"""Errors, units and small maths that every other package may use. Pure: no I/O, no torch."""
