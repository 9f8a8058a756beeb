"""Tokens' bytes in and out of page slices, for every payload's layout."""

import pytest
import torch

from benthic.attention.page_records import PageRecords, Places, grouped_records, index_records, latent_records

PAGE, PAGES = 4, 6
LAYOUTS = [
    (grouped_records(PAGE, 2, 6, 2), (2, PAGE, 2, 6), torch.bfloat16),
    (grouped_records(PAGE, 2, 8, 4), (2, PAGE, 2, 8), torch.float32),
    (latent_records(PAGE, 20 * 4), (PAGE, 20), torch.float32),
    (latent_records(PAGE, 32 + 4 + 2 * 3), (PAGE, 42), torch.uint8),
    (index_records(PAGE, 5, 2, fp8=False), (PAGE, 5), torch.bfloat16),
    (index_records(PAGE, 32, 1, fp8=True), (PAGE * 36,), torch.uint8),
    (index_records(PAGE, 7, 1, fp8=True), (PAGE * 11,), torch.uint8),
]


def fields(records: PageRecords, pool: torch.Tensor, page: int, offset: int) -> list[int]:
    """The token's bytes by hand: the K half and the V half, or codes and scales, or one run."""
    raw = pool[page].contiguous().view(-1).view(torch.uint8).tolist()
    assert len(raw) == records.slice_bytes
    if pool.dim() == 5:
        widths = [records.record_bytes // 2] * 2
    elif pool.dim() == 2:
        widths = [records.record_bytes - 4, 4]
    else:
        widths = [records.record_bytes]
    found, at = [], 0
    for width in widths:
        found += raw[at + offset * width : at + (offset + 1) * width]
        at += PAGE * width
    return found


@pytest.mark.parametrize("count", [0, 1, 9])
@pytest.mark.parametrize(("records", "shape", "dtype"), LAYOUTS)
def test_tokens_are_read_and_put_in_place(
    records: PageRecords, shape: tuple[int, ...], dtype: torch.dtype, count: int
) -> None:
    rng = torch.Generator().manual_seed(0)
    size = torch.empty(shape, dtype=dtype).nbytes
    layers = torch.randint(256, (2, PAGES, size), generator=rng, dtype=torch.uint8).view(dtype).view(2, PAGES, *shape)
    before = layers.view(torch.uint8).clone()
    slots = torch.randperm(PAGES * PAGE, generator=rng)[:count]
    read = records.read(layers[1], Places.of(slots, PAGE))
    assert read.tolist() == [fields(records, layers[1], int(slot) // PAGE, int(slot) % PAGE) for slot in slots]
    other = torch.zeros_like(layers[0])
    wider = torch.cat((torch.ones((count, 3), dtype=torch.uint8), read), 1)
    records.write(other, Places.of(slots, PAGE), wider[:, 3:])  # columns of something wider
    for slot in range(PAGES * PAGE):
        held = fields(records, other, slot // PAGE, slot % PAGE)
        wanted = fields(records, layers[1], slot // PAGE, slot % PAGE)
        assert held == (wanted if slot in slots.tolist() else [0] * records.record_bytes)
    pages = torch.tensor([4, 0])
    records.write_pages(layers[0], pages, records.read_pages(layers[1], torch.tensor([2, 5], dtype=torch.int32)))
    before[0, 4], before[0, 0] = before[1, 2], before[1, 5]
    assert torch.equal(layers.view(torch.uint8), before)
