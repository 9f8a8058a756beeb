"""The models of the benchmarks over several ranks, by name; weights drawn at random, the same ones on every rank."""

import torch

from benchmarks.engine import random_llama
from benchmarks.random_dsa import DATA, random_dsa, read_raw
from benthic.models.registry import Checkpoint

DSA = {"dsa-tiny": "tiny_dsa.json", "dsa-8b": "glm_dsa_8b.json"}
NAMES = ("llama-tiny", "llama-small", "llama-1b", "llama-8b", *DSA)


def checkpoint(name: str, device: torch.device) -> Checkpoint:
    """One of NAMES, drawn on `device`."""
    if name in DSA:
        return random_dsa(read_raw(DATA / DSA[name], shared=False), device)
    return random_llama(name.removeprefix("llama-"), device)
