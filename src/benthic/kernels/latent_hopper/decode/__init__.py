"""Decode: many short programs, in which the warps that multiply also gather."""
