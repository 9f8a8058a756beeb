"""The likeliest token of each row, put where the next step reads its input."""

import torch

from benthic.kernels.choice import use_triton
from benthic.kernels.greedy_pick.reference import greedy_pick_reference


def greedy_pick(logits: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor, last_tokens: torch.Tensor) -> None:
    """tokens[i] = last_tokens[slots[i]] = the argmax of logits[i], of equal ones the lowest.

    logits float32 [n, V], any row stride, without NaN; slots and tokens int64 [n]; last_tokens int64 [N]. Of rows with
    the same slot any may win.
    """
    rows = len(logits)
    if logits.dim() != 2 or slots.shape != (rows,) or tokens.shape != (rows,) or last_tokens.dim() != 1:
        raise ValueError(
            f"greedy_pick: {tuple(logits.shape)} logits, {tuple(slots.shape)} slots and {tuple(tokens.shape)} tokens "
            "do not fit"
        )
    if use_triton(logits):
        from benthic.kernels.greedy_pick.kernel import greedy_pick_triton  # triton is optional

        greedy_pick_triton(logits, slots, tokens, last_tokens)
    else:
        greedy_pick_reference(logits, slots, tokens, last_tokens)


__all__ = ["greedy_pick", "greedy_pick_reference"]
