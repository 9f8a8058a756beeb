"""`greedy_pick` in plain torch."""

import torch


def greedy_pick_reference(
    logits: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor, last_tokens: torch.Tensor
) -> None:
    """See `benthic.kernels.greedy_pick.greedy_pick`."""
    tokens.copy_(torch.argmax(logits, dim=-1))
    last_tokens.index_copy_(0, slots, tokens)
