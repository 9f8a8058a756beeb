"""Runs forward passes: model runner, decode graphs, sampler, and the thread that keeps one step ahead."""
