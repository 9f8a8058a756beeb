"""Pairs of a token and one of its experts, brought into the order of the experts."""
