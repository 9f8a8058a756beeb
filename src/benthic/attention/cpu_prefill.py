"""Attention of many queries over many keys in bfloat16 on a CPU, by oneDNN products instead of the flash kernel.

Without AMX, torch's flash kernel reaches a quarter of the rate that oneDNN's products have. Here the scores are float32
and the weighted sum bfloat16; probabilities are rounded to bfloat16 before the sum, as the flash kernel does.
"""

import torch

_BLOCK = 64  # queries; their scores over some thousand keys stay in the second-level cache


def is_faster(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this machine's flash kernel is the slower way."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and not torch.cpu._is_amx_tile_supported()


def attend_chunk(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float, out: torch.Tensor
) -> None:
    """q [T, H, d] are the last tokens of keys and values [G, S, d]; writes out [T, H, d].

    mask [T, T] is 0 up to the diagonal and -inf above, float32: what a query sees of the chunk itself.
    """
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, num_keys, _ = keys.shape
    shared, context = num_heads // num_kv_heads, num_keys - num_queries
    by_head = (q.float() * scale).view(num_queries, num_kv_heads, shared, head_dim).permute(1, 2, 0, 3)
    result = out.view(num_queries, num_kv_heads, shared, head_dim)
    for head in range(num_kv_heads):
        head_keys, head_values = keys[head].float(), values[head].t().contiguous()
        for first in range(0, num_queries, _BLOCK):
            last = min(first + _BLOCK, num_queries)
            count, seen = last - first, context + last
            scores = _product(by_head[head, :, first:last].reshape(-1, head_dim), head_keys[:seen])
            scores.view(shared, count, seen)[:, :, seen - count :].add_(mask[:count, :count])
            weights = torch.softmax(scores, -1).to(q.dtype)
            attended = _product(weights, head_values[:, :seen].contiguous())
            result[first:last, head] = attended.view(shared, count, head_dim).transpose(0, 1)


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [n, k], weight [m, k] -> x weightᵀ [n, m]. Both contiguous: strided ones take oneDNN's plain loops."""
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return result
