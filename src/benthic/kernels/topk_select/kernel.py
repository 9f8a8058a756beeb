"""`topk_select` in Triton: two guesses around the k-th largest score, one pass that counts, one that chooses.

A radix select counts a digit of every score in a histogram, which costs more than reading here: Triton's histogram
takes a vote and a mask a bin, atomics meet at the same few bins. Instead, a program takes a sample of its row and finds
two scores there, one a bit above and one a bit below where the k-th largest of the row should lie. One pass counts how
many of the row reach either; the next writes the positions of all above both, and keeps what lies between, a few
hundred candidates. Among these the k-th largest is found by cutting their range, in registers. The guesses only cost
time where they are wrong: the range is then halved, a pass each, until it holds the k-th largest and few enough
candidates, or a single value (many ties), so the result is always exact.

A pass is a loop over tiles of [DEPTH, LANES] scores. Each lane (of which a thread has four, its vector) counts its own
scores, so that sums over lanes, once a row, tell where a lane writes: the passes themselves exchange nothing between
threads. Positions thus come by lane, and where equal scores decide, they are compared or taken in the row's order.
Scores are ordered as integers (`_ordered`, its own inverse), but reached or not as floats: -0 equals 0 there, and NaN,
which stands for what lies outside the row, reaches nothing.
Limits: k and rows below 2**31, a lane's scores, samples and candidates below 2**15, contiguous rows.
"""

import torch
import triton
import triton.language as tl

from benthic.kernels.pdl import launch_dependents, pdl, wait_for_previous
from benthic.kernels.tiles import num_sms
from benthic.kernels.topk_select.plan import SelectSizes, parts_of, sizes_of

_LEAST = tl.constexpr(-2139095041)  # _ordered(-inf)
_BEYOND = tl.constexpr(2139095041)  # _ordered(inf) + 1; a NaN as a float: no score reaches it
_OUTSIDE = tl.constexpr(-2147483648)  # below every place


@triton.jit
def _ordered(bits):
    """Bits of floats as integers in the floats' order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _as_float(place):
    return _ordered(place).to(tl.float32, bitcast=True)


@triton.jit
def _as_place(score):
    return tl.where(score == 0.0, 0, _ordered(score.to(tl.int32, bitcast=True)))  # -0 equals 0


@triton.jit
def _width(low, high):
    """high - low, of places that may lie 2**32 apart."""
    return high.to(tl.uint32) - low.to(tl.uint32)


@triton.jit
def _shift(place, step):
    return (place.to(tl.uint32) + step).to(tl.int32)


@triton.jit
def _guess(row_ptr, length, k, SAMPLE: tl.constexpr, DEVIATIONS: tl.constexpr):
    """Places that about k + a margin and k - a margin scores of the row reach, judged by SAMPLE of its scores."""
    index = tl.arange(0, SAMPLE).to(tl.int64)  # index * length passes 2**31
    sample = tl.load(row_ptr + index * length // SAMPLE)
    rank = k.to(tl.float32) * SAMPLE / length
    margin = DEVIATIONS * tl.sqrt(rank) + 2  # standard deviations of a random sample's count
    low_count = tl.minimum(rank + margin, SAMPLE).to(tl.int32)  # reached by at least so many
    high_count = tl.maximum(rank - margin, 0.0).to(tl.int32)  # by at most so many
    slack = (margin * 0.25).to(tl.int32)  # being off by that is good enough
    least = _as_place(tl.min(sample, 0))
    beyond = _as_place(tl.max(sample, 0)) + 1
    low, low_end, low_found = least, beyond, tl.full((), SAMPLE, tl.int32)  # reached by low_count or more; by fewer
    high_start, high, high_found = least, beyond, tl.zeros((), tl.int32)  # by more than high_count; by no more
    is_open = _width(least, beyond) > 1
    while is_open:
        # both are looked for in the same range, which two places cut in three, and then each in its own
        low_width, high_width = _width(low, low_end), _width(high_start, high)
        third = tl.maximum((low_width >> 3) * 3, 1)
        one = low_end > high_start
        a = _shift(low, tl.where(one, third, low_width >> 1))
        b = _shift(high_start, tl.where(one, high_width - third, high_width >> 1))
        both = tl.sum((sample >= _as_float(a)).to(tl.int32) + ((sample >= _as_float(b)).to(tl.int32) << 16), 0)
        for which in tl.static_range(2):
            place = b if which else a
            found = both >> 16 if which else both & 0xFFFF
            reaches, beneath = found >= low_count, found <= high_count
            low = tl.where(reaches, tl.maximum(low, place), low)
            low_found = tl.where(reaches, tl.minimum(low_found, found), low_found)
            low_end = tl.where(reaches, low_end, tl.minimum(low_end, place))
            high = tl.where(beneath, tl.minimum(high, place), high)
            high_found = tl.where(beneath, tl.maximum(high_found, found), high_found)
            high_start = tl.where(beneath, high_start, tl.maximum(high_start, place))
        low_open = (_width(low, low_end) > 1) & (low_found > low_count + slack)
        is_open = low_open | ((_width(high_start, high) > 1) & (high_found < high_count - slack))
    return low, high


@triton.jit
def _load_tile(
    row_ptr, start, length,
    LANES: tl.constexpr, DEPTH: tl.constexpr, VECTOR: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """[DEPTH, LANES] positions from `start` on and their scores, NaN past the row's end.

    The mask ends at a multiple of VECTOR, which makes such wide loads; the row's memory does not end before that.
    """
    position = start + tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    if LAST:
        score = tl.load(row_ptr + position, mask=position < tl.cdiv(length, VECTOR) * VECTOR, other=0.0)
        score = tl.where(position < length, score, float("nan"))
    else:
        score = tl.load(row_ptr + position)
    return position, score


@triton.jit
def _count_tile(
    row_ptr, start, length, low, high,
    LANES: tl.constexpr, DEPTH: tl.constexpr, VECTOR: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    _, score = _load_tile(row_ptr, start, length, LANES, DEPTH, VECTOR, LAST)
    return tl.sum((score >= low).to(tl.int32) + ((score >= high).to(tl.int32) << 16), 0)


@triton.jit
def _count(row_ptr, length, low, high, LANES: tl.constexpr, DEPTH: tl.constexpr, VECTOR: tl.constexpr):
    """How many of the row reach the places `low` and `high`, and of each lane (high's in the upper half)."""
    low, high = _as_float(low), _as_float(high)
    lanes = tl.zeros((LANES,), tl.int32)
    whole = length // (DEPTH * LANES) * (DEPTH * LANES)
    for start in tl.range(0, whole, DEPTH * LANES):
        lanes += _count_tile(row_ptr, start, length, low, high, LANES, DEPTH, VECTOR, False)
    if whole < length:
        lanes += _count_tile(row_ptr, whole, length, low, high, LANES, DEPTH, VECTOR, True)
    both = tl.sum((lanes & 0xFFFF).to(tl.int64) + ((lanes >> 16).to(tl.int64) << 32), 0)
    return (both & 0xFFFFFFFF).to(tl.int32), (both >> 32).to(tl.int32), lanes


@triton.jit
def _bracket(
    row_ptr, length, k,
    LANES: tl.constexpr, DEPTH: tl.constexpr, VECTOR: tl.constexpr, SAMPLE: tl.constexpr, CANDIDATES: tl.constexpr,
    DEVIATIONS: tl.constexpr,
):  # fmt: skip
    """Places low < high (or equal) with their counts: low is reached by k or more, high by fewer (or by k, if equal).

    CANDIDATES at most lie between, unless all those are equal: high = low + 1.
    """
    low, high = tl.full((), _LEAST, tl.int32), tl.full((), _BEYOND, tl.int32)
    if length > CANDIDATES:
        low, high = _guess(row_ptr, length, k, SAMPLE, DEVIATIONS)
    low_count, high_count, lanes = _count(row_ptr, length, low, high, LANES, DEPTH, VECTOR)
    far = (low_count - high_count > CANDIDATES) & (_width(low, high) > 1)
    if (low_count < k) | (high_count > k) | far:  # a guess was wrong, or far off
        guess, found, above = low, low_count, high_count
        low = tl.where(high_count >= k, high, tl.where(found >= k, guess, _LEAST))
        low_count = tl.where(above >= k, above, tl.where(found >= k, found, length))
        is_low = found < k  # then the upper guess says no more than the lower one
        high = tl.where(is_low, guess, tl.where(above >= k, _BEYOND, high))
        high_count = tl.where(is_low, found, tl.where(above >= k, 0, above))
        while (low_count - high_count > CANDIDATES) & (_width(low, high) > 1):
            middle = _shift(low, _width(low, high) >> 1)
            reach, _, _ = _count(row_ptr, length, middle, middle, LANES, DEPTH, VECTOR)
            low_count = tl.where(reach >= k, reach, low_count)
            low = tl.where(reach >= k, middle, low)
            high_count = tl.where(reach <= k, reach, high_count)
            high = tl.where(reach <= k, middle, high)
        _, _, lanes = _count(row_ptr, length, low, high, LANES, DEPTH, VECTOR)
    return low, high, low_count, high_count, lanes


@triton.jit
def _narrow(keys, wanted, low, high):
    """Narrow low .. high, reached by `wanted` keys or more and by fewer, to the `wanted`-th largest key.

    Returns low, high and how many reach high: high = low + 1, or `wanted` keys reach high = low.
    """
    reach_high = tl.zeros((), tl.int32)
    while _width(low, high) > 1:
        width = _width(low, high)
        third = tl.maximum((width >> 3) * 3, 1)
        a, b = _shift(low, third), _shift(low, width - third)
        both = tl.sum((keys >= a).to(tl.int32) + ((keys >= b).to(tl.int32) << 16), 0)
        reach_a, reach_b = both & 0xFFFF, both >> 16
        low = tl.where((reach_a > wanted) & (reach_b >= wanted), b, tl.where(reach_a >= wanted, a, low))
        high = tl.where(reach_a <= wanted, a, tl.where(reach_b <= wanted, b, high))
        reach_high = tl.where(reach_a <= wanted, reach_a, tl.where(reach_b <= wanted, reach_b, reach_high))
    return low, high, reach_high


@triton.jit
def _put(
    index, mask, position, score, origin_ptr, out_ptr, out_scores_ptr, base,
    ORIGINS: tl.constexpr, SCORES: tl.constexpr,
):  # fmt: skip
    """Write the row's positions (those that `origin_ptr` names for them, in the second stage), and their scores.

    Pointers are said to come in aligned fours. They do not, but so they stay in the layout of the loads, where Triton
    would exchange them between the threads first. It never joins stores whose masks may differ, as these may.
    """
    target, score_target = out_ptr + index, out_scores_ptr + index
    if len(index.shape) == 2:
        target = tl.max_contiguous(tl.multiple_of(target, [1, 16]), [1, 4])
        score_target = tl.max_contiguous(tl.multiple_of(score_target, [1, 16]), [1, 4])
    else:
        target = tl.max_contiguous(tl.multiple_of(target, 16), 4)
        score_target = tl.max_contiguous(tl.multiple_of(score_target, 16), 4)
    if SCORES:
        tl.store(score_target, score, mask=mask)
    if ORIGINS:
        position = tl.load(origin_ptr + position, mask=mask, other=0)
    tl.store(target, base + position, mask=mask)


@triton.jit
def _keep_tile(
    row_ptr, origin_ptr, out_ptr, out_scores_ptr, kept_ptr, base, start, length, low, high, above_next, between_next,
    LANES: tl.constexpr, DEPTH: tl.constexpr, VECTOR: tl.constexpr, LAST: tl.constexpr,
    ORIGINS: tl.constexpr, SCORES: tl.constexpr,
):  # fmt: skip
    position, score = _load_tile(row_ptr, start, length, LANES, DEPTH, VECTOR, LAST)
    is_above = score >= high
    is_between = (score >= low) & (is_above == 0)  # not < high, which may be NaN
    above, between = is_above.to(tl.int32), is_between.to(tl.int32)
    above_place = tl.cumsum(above, 0) - above + above_next[None, :]
    between_place = tl.cumsum(between, 0) - between + between_next[None, :]
    _put(above_place, is_above, position, score, origin_ptr, out_ptr, out_scores_ptr, base, ORIGINS, SCORES)
    tl.store(tl.max_contiguous(tl.multiple_of(kept_ptr + between_place, [1, 16]), [1, 4]), position, mask=is_between)
    return tl.sum(above, 0), tl.sum(between, 0)


@triton.jit
def _keep(
    row_ptr, origin_ptr, out_ptr, out_scores_ptr, kept_ptr, base, length, low, high, lanes,
    LANES: tl.constexpr, DEPTH: tl.constexpr, VECTOR: tl.constexpr, ORIGINS: tl.constexpr, SCORES: tl.constexpr,
):  # fmt: skip
    """Put the scores that reach `high`, keep the positions of others that reach `low`, from where `lanes` says."""
    high_score = _as_float(high)
    above = lanes >> 16
    above_next = tl.cumsum(above, 0) - above
    between = (lanes & 0xFFFF) - above
    between_next = tl.cumsum(between, 0) - between
    # a single value, of which there may be many: none of these is kept
    low_score = tl.where(_width(low, high) == 1, high_score, _as_float(low))
    whole = length // (DEPTH * LANES) * (DEPTH * LANES)
    for start in tl.range(0, whole, DEPTH * LANES):
        above, between = _keep_tile(
            row_ptr, origin_ptr, out_ptr, out_scores_ptr, kept_ptr, base, start, length, low_score, high_score,
            above_next, between_next, LANES, DEPTH, VECTOR, False, ORIGINS, SCORES,
        )  # fmt: skip
        above_next += above
        between_next += between
    if whole < length:
        _keep_tile(
            row_ptr, origin_ptr, out_ptr, out_scores_ptr, kept_ptr, base, whole, length, low_score, high_score,
            above_next, between_next, LANES, DEPTH, VECTOR, True, ORIGINS, SCORES,
        )  # fmt: skip


@triton.jit
def _equal_block(
    row_ptr, origin_ptr, start, length, low, high,
    BLOCK: tl.constexpr, ORIGINS: tl.constexpr,
):  # fmt: skip
    """Indices in the row from `start` on, their scores, positions, and which reach `low` but not `high`."""
    index = start + tl.arange(0, BLOCK)
    score = tl.load(row_ptr + index, mask=index < length, other=float("nan"))
    is_equal = (score >= low) & ((score >= high) == 0)
    position = index
    if ORIGINS:
        position = tl.load(origin_ptr + index, mask=is_equal, other=0)
    return index, score, position, is_equal


@triton.jit
def _last_of_first(
    row_ptr, origin_ptr, length, low, high, wanted,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The origin's `wanted`-th lowest position among scores that reach `low` but not `high`, found by halving."""
    first, last = tl.full((), -1, tl.int32), tl.full((), 2147483647, tl.int32)  # fewer are so low; enough
    while _width(first, last) > 1:
        middle = _shift(first, _width(first, last) >> 1)
        below = tl.zeros((BLOCK,), tl.int32)
        for start in tl.range(0, length, BLOCK):
            _, _, position, is_equal = _equal_block(row_ptr, origin_ptr, start, length, low, high, BLOCK, True)
            below += (is_equal & (position <= middle)).to(tl.int32)
        enough = tl.sum(below, 0) >= wanted
        last = tl.where(enough, middle, last)
        first = tl.where(enough, first, middle)
    return last


@triton.jit
def _put_first(
    row_ptr, origin_ptr, out_ptr, out_scores_ptr, base, length, low, high, known, k,
    BLOCK: tl.constexpr, ORIGINS: tl.constexpr, SCORES: tl.constexpr,
):  # fmt: skip
    """Put those with the lowest positions of the scores that reach `low` but not `high`, until there are k."""
    low_score, high_score = _as_float(low), _as_float(high)
    last = tl.full((), 2147483647, tl.int32)
    if ORIGINS:  # the row is not in the order of the positions
        last = _last_of_first(row_ptr, origin_ptr, length, low_score, high_score, k - known, BLOCK)
    start = tl.zeros((), tl.int32)
    while (start < length) & (known < k):
        index, score, position, chosen = _equal_block(
            row_ptr, origin_ptr, start, length, low_score, high_score, BLOCK, ORIGINS
        )
        chosen = chosen & (position <= last)
        place = known + tl.cumsum(chosen.to(tl.int32), 0) - 1
        _put(
            place, chosen & (place < k), index, score,
            origin_ptr, out_ptr, out_scores_ptr, base, ORIGINS, SCORES,
        )  # fmt: skip
        known += tl.sum(chosen.to(tl.int32), 0)
        start += BLOCK


@triton.jit
def _put_best(
    row_ptr, origin_ptr, out_ptr, out_scores_ptr, kept_ptr, base, low, high, count, known, k,
    CANDIDATES: tl.constexpr, ORIGINS: tl.constexpr, SCORES: tl.constexpr,
):  # fmt: skip
    """Put the k - known largest of `count` candidates, of equal ones those with the lowest positions."""
    wanted = k - known
    index = tl.arange(0, CANDIDATES)
    position = tl.load(kept_ptr + index, mask=index < count, other=0)
    score = tl.load(row_ptr + position, mask=index < count, other=0.0)
    place = tl.where(index < count, _as_place(score), _OUTSIDE)
    low, high, reach = _narrow(place, wanted, low, high)
    chosen = place >= high
    if reach < wanted:  # of those equal to the last one, the first
        is_equal = (place >= low) & (chosen == 0)
        order = position
        if ORIGINS:  # the row is not in the order of the positions
            order = tl.load(origin_ptr + position, mask=is_equal, other=0)
        backwards = tl.where(is_equal, -order, _OUTSIDE)
        least, beyond = tl.full((), _OUTSIDE + 1, tl.int32), tl.full((), 1, tl.int32)
        last, _, _ = _narrow(backwards, wanted - reach, least, beyond)
        chosen = chosen | (backwards >= last)
    index = known + tl.cumsum(chosen.to(tl.int32), 0) - 1
    _put(index, chosen, position, score, origin_ptr, out_ptr, out_scores_ptr, base, ORIGINS, SCORES)


@triton.jit
def _select_row(
    row_ptr, origin_ptr, out_ptr, out_scores_ptr, kept_ptr, base, length, k,
    LANES: tl.constexpr, DEPTH: tl.constexpr, VECTOR: tl.constexpr, SAMPLE: tl.constexpr, CANDIDATES: tl.constexpr,
    DEVIATIONS: tl.constexpr, ORIGINS: tl.constexpr, SCORES: tl.constexpr,
):  # fmt: skip
    low, high, low_count, high_count, lanes = _bracket(
        row_ptr, length, k, LANES, DEPTH, VECTOR, SAMPLE, CANDIDATES, DEVIATIONS
    )
    _keep(
        row_ptr, origin_ptr, out_ptr, out_scores_ptr, kept_ptr, base, length, low, high, lanes,
        LANES, DEPTH, VECTOR, ORIGINS, SCORES,
    )  # fmt: skip
    if _width(low, high) == 1:  # all between are equal
        _put_first(
            row_ptr, origin_ptr, out_ptr, out_scores_ptr, base, length, low, high, high_count, k,
            LANES, ORIGINS, SCORES,
        )  # fmt: skip
    elif high_count < k:
        tl.debug_barrier()  # other threads wrote what this one reads
        _put_best(
            row_ptr, origin_ptr, out_ptr, out_scores_ptr, kept_ptr, base, low, high,
            low_count - high_count, high_count, k, CANDIDATES, ORIGINS, SCORES,
        )  # fmt: skip
        tl.debug_barrier()  # the next row's positions overwrite these


# the scores' width and where a batch's rows start change from step to step: no new compilation for such numbers
@triton.jit(
    do_not_specialize=["num_rows", "k", "parts", "stride_kept"],
    do_not_specialize_on_alignment=["lens_ptr", "out_ptr", "origin_ptr"],
)
def _select_kernel(
    scores_ptr, lens_ptr, origin_ptr, out_ptr, out_scores_ptr, kept_ptr, num_rows, k, parts, part_size,
    stride_row, stride_origin, stride_out, stride_kept,
    LANES: tl.constexpr, DEPTH: tl.constexpr, VECTOR: tl.constexpr, SAMPLE: tl.constexpr, CANDIDATES: tl.constexpr,
    DEVIATIONS: tl.constexpr, STAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """STAGE 0: rows of scores. 1: their parts, keeping scores. 2: the parts' results, whose positions `origin` has."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    ORIGINS: tl.constexpr = STAGE == 2
    SCORES: tl.constexpr = STAGE == 1
    kept = kept_ptr + tl.program_id(0).to(tl.int64) * stride_kept
    for item in range(tl.program_id(0), num_rows * parts, tl.num_programs(0)):
        row = (item // parts).to(tl.int64)  # row * stride_row passes 2**31
        part = item % parts
        length = tl.load(lens_ptr + row)
        base = 0
        if STAGE == 1:
            base = part * part_size
            length = tl.maximum(tl.minimum(length - base, part_size), 0)
        if STAGE == 2:  # every part before the last has part_size > k scores, of which k are left
            length = length // part_size * k + tl.minimum(length % part_size, k)
        row_ptr = scores_ptr + row * stride_row + base
        origin = origin_ptr + row * stride_origin
        out = out_ptr + row * stride_out + part * k
        out_scores = out_scores_ptr + row * stride_out + part * k
        if length > k:
            _select_row(
                row_ptr, origin, out, out_scores, kept, base, length, k,
                LANES, DEPTH, VECTOR, SAMPLE, CANDIDATES, DEVIATIONS, ORIGINS, SCORES,
            )  # fmt: skip
        else:
            for start in range(0, k, LANES):
                index = start + tl.arange(0, LANES)
                inside = index < length
                position = base + index
                if ORIGINS:
                    position = tl.load(origin + index, mask=inside, other=-1)
                tl.store(out + index, tl.where(inside, position, -1), mask=index < k)
                if SCORES:
                    score = tl.load(row_ptr + index, mask=inside, other=0.0)
                    tl.store(out_scores + index, score, mask=inside)


def topk_select_triton(
    scores: torch.Tensor,
    lens: torch.Tensor,
    k: int,
    out: torch.Tensor,
    sizes: SelectSizes | None = None,
    parts: tuple[int, int] | None = None,
) -> torch.Tensor:
    """See `benthic.kernels.topk_select.topk_select`; `sizes` and `parts` override the plan (tuning, tests)."""
    num_rows, width = scores.shape
    if num_rows == 0:
        return out
    assert scores.stride(1) == out.stride(1) == lens.stride(0) == 1, "rows are contiguous"
    count, size = parts or parts_of(num_rows, width, k, scores.device)
    if count == 1:
        _launch(0, scores, lens, scores, out, out, num_rows, k, 1, width, sizes)
        return out
    assert count * size >= width, "the parts cover the row"
    assert size > k, "a part holds more than k scores"
    best = torch.empty((num_rows, count * k), dtype=torch.int32, device=scores.device)
    best_scores = torch.empty((num_rows, count * k), dtype=torch.float32, device=scores.device)
    _launch(1, scores, lens, scores, best, best_scores, num_rows, k, count, size, sizes)
    _launch(2, best_scores, lens, best, out, out, num_rows, k, 1, size, sizes)
    return out


def _launch(
    stage: int,
    scores: torch.Tensor,
    lens: torch.Tensor,
    origin: torch.Tensor,
    out: torch.Tensor,
    out_scores: torch.Tensor,
    num_rows: int,
    k: int,
    parts: int,
    part_size: int,
    sizes: SelectSizes | None,
) -> None:
    width = part_size if stage == 1 else scores.shape[1]
    sizes = sizes or sizes_of(num_rows * parts, width, scores.device)
    aligned = scores.stride(0) % 16 == 0 and scores.shape[1] % 4 == 0 and scores.data_ptr() % 16 == 0
    vector = 4 if aligned and part_size % 4 == 0 else 1
    programs = min(num_rows * parts, sizes.per_sm * num_sms(scores.device))
    kept = torch.empty((programs, sizes.candidates), dtype=torch.int32, device=scores.device)
    _select_kernel[(programs,)](
        scores, lens, origin, out, out_scores, kept, num_rows, k, parts, part_size,
        scores.stride(0), origin.stride(0), out.stride(0), kept.stride(0),
        LANES=sizes.lanes, DEPTH=sizes.depth, VECTOR=vector, SAMPLE=sizes.sample, CANDIDATES=sizes.candidates,
        DEVIATIONS=sizes.deviations, STAGE=stage, num_warps=sizes.warps, num_stages=1, maxnreg=sizes.registers,
        **pdl(scores.device),
    )  # fmt: skip
