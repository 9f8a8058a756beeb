"""Triton pieces that the kernels around latents share; each works on one row or on several at their pointers."""

import triton
import triton.language as tl


@triton.jit
def normed_row(x, weight, eps, N: tl.constexpr):
    """rms_norm of a float32 row held in `x` (any shape, zeros behind its N): rounded to weight's type, then scaled."""
    scale = 1.0 / tl.sqrt(tl.sum(x * x) / N + eps)
    normed = (x * scale).to(weight.dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(weight.dtype).to(tl.float32)


@triton.jit
def pairs(dims, P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The partner that each of `dims` turns with, its angle's index, and whether it is its pair's second."""
    if INTERLEAVED:
        partner = dims ^ 1
        angle = dims // 2
        second = dims % 2 == 1
    else:
        second = dims >= P // 2
        partner = tl.where(second, dims - P // 2, dims + P // 2)
        angle = tl.where(second, dims - P // 2, dims)
    inside = dims < P
    return tl.where(inside, partner, dims), tl.where(inside, angle, 0), second


@triton.jit
def turned(x, partner, cos, sin, second):
    """`x` beside its `partner`, turned."""
    return tl.where(second, x * cos + partner * sin, x * cos - partner * sin)


@triton.jit
def codes_of(x, scale):
    """e4m3 codes of float32 `x`: divided as torch divides, so that both round alike."""
    return tl.clamp(tl.div_rn(x, scale), -448.0, 448.0).to(tl.float8e4nv)


@triton.jit
def scale_of(amax):
    """The scale that brings `amax` to the largest code."""
    return tl.div_rn(tl.maximum(amax, 1e-12), tl.full(amax.shape, 448.0, tl.float32))


@triton.jit
def load_pairs(rows, inside, HALF: tl.constexpr, BLOCK_P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both components of the pairs at the pointers `rows` [n], float32 [n, BLOCK_P] each, in loads of 16 bytes."""
    if INTERLEAVED:  # loaded as they lie; a thread holds both of a pair
        dims = tl.arange(0, 2 * BLOCK_P)[None, :]
        x = tl.load(rows[:, None] + dims, mask=inside[:, None] & (dims < 2 * HALF), other=0.0).to(tl.float32)
        low, high = tl.split(tl.reshape(x, (x.shape[0], BLOCK_P, 2)))
    else:
        dims = tl.arange(0, BLOCK_P)[None, :]
        mask = inside[:, None] & (dims < HALF)
        low = tl.load(rows[:, None] + dims, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(rows[:, None] + HALF + dims, mask=mask, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def store_pairs(rows, low, high, inside, HALF: tl.constexpr, BLOCK_P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The way back of `load_pairs`; low and high in the type of what `rows` point to."""
    if INTERLEAVED:
        dims = tl.arange(0, 2 * BLOCK_P)[None, :]
        x = tl.reshape(tl.join(low, high), (low.shape[0], 2 * BLOCK_P))
        tl.store(rows[:, None] + dims, x, mask=inside[:, None] & (dims < 2 * HALF))
    else:
        dims = tl.arange(0, BLOCK_P)[None, :]
        mask = inside[:, None] & (dims < HALF)
        tl.store(rows[:, None] + dims, low, mask=mask)
        tl.store(rows[:, None] + HALF + dims, high, mask=mask)


@triton.jit
def turn_pairs(low, high, table_rows, HALF: tl.constexpr, BLOCK_P: tl.constexpr):
    """Pairs [n, BLOCK_P] turned by their rows' angles; `table_rows` [n]: HALF cosines, then as many sines."""
    dims = tl.arange(0, BLOCK_P)[None, :]
    pointers = table_rows[:, None] + dims
    cos = tl.load(pointers, mask=dims < HALF, other=1.0)
    sin = tl.load(pointers + HALF, mask=dims < HALF, other=0.0)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def turn_rows(
    rows, table_rows, inside, HALF: tl.constexpr, BLOCK_P: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """Turn, in place, the 2 * HALF components at each of `rows` [n] that is `inside`."""
    low, high = load_pairs(rows, inside, HALF, BLOCK_P, INTERLEAVED)
    low, high = turn_pairs(low, high, table_rows, HALF, BLOCK_P)
    dtype = rows.dtype.element_ty
    store_pairs(rows, low.to(dtype), high.to(dtype), inside, HALF, BLOCK_P, INTERLEAVED)


@triton.jit
def quantise_rows(
    rows, table_rows, weights, inside, codes, scaled,
    E: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Turn the first 2 * HALF of E components at each of `rows` [n] and quantise all.

    The codes go to the pointers `codes` [n], each row's weight times its scale from `weights` [n] to `scaled` [n].
    BLOCK_R: columns behind the turned ones, a power of two, or 0.
    """
    low, high = load_pairs(rows, inside, HALF, BLOCK_P, INTERLEAVED)
    REST: tl.constexpr = BLOCK_R if BLOCK_R > 0 else 16
    dims = tl.arange(0, REST)[None, :]
    mask = inside[:, None] & (dims < E - 2 * HALF)  # all false where BLOCK_R is 0: then nothing of it is compiled
    if BLOCK_R > 0:
        rest = tl.load(rows[:, None] + 2 * HALF + dims, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weights, mask=inside, other=0.0)
    low, high = turn_pairs(low, high, table_rows, HALF, BLOCK_P)
    amax = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1)
    if BLOCK_R > 0:
        amax = tl.maximum(amax, tl.max(tl.abs(rest), 1))
    scale = scale_of(amax)
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    tl.store(scaled, weight * scale, mask=inside)
    store_pairs(
        codes, codes_by(low, scale, inverse), codes_by(high, scale, inverse), inside, HALF, BLOCK_P, INTERLEAVED
    )
    if BLOCK_R > 0:
        tl.store(codes[:, None] + 2 * HALF + dims, codes_by(rest, scale, inverse), mask=mask)


@triton.jit
def codes_by(x, scale, inverse):
    """`codes_of` x [n, m] by scale [n] in three operations: the quotient, corrected by its remainder, is exact."""
    scale, inverse = scale[:, None], inverse[:, None]
    quotient = x * inverse
    quotient = tl.fma(tl.fma(-quotient, scale, x), inverse, quotient)
    return tl.clamp(quotient, -448.0, 448.0).to(tl.float8e4nv)


@triton.jit
def write_latent(
    x_ptr, weight_ptr, eps, table_row, record_ptr, scale_ptr, rope_ptr,
    R: tl.constexpr, P: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_P: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One token's record: the normed latent at `record_ptr` (fp8: scales at `scale_ptr`), the rope at `rope_ptr`."""
    block = tl.arange(0, BLOCKS)
    dims = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    mask = dims < R  # R need not fill its last block, nor the blocks a power of two
    x = tl.load(x_ptr + dims, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + dims, mask=mask, other=0.0).to(x_ptr.dtype.element_ty)
    latent = normed_row(x, weight, eps, R)
    if FP8:
        scale = scale_of(tl.max(tl.abs(latent), 1))
        tl.store(record_ptr + dims, codes_of(latent, scale[:, None]), mask=mask)
        tl.store(scale_ptr + block, scale, mask=block * 128 < R)
    else:
        tl.store(record_ptr + dims, latent.to(record_ptr.dtype.element_ty), mask=mask)
    rope = tl.arange(0, BLOCK_P)
    inside = rope < P  # padded to a power of two
    partner, angle, second = pairs(rope, P, True)
    cos = tl.load(table_row + angle, mask=inside, other=1.0)
    sin = tl.load(table_row + P // 2 + angle, mask=inside, other=0.0)
    x = tl.load(x_ptr + R + rope, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x_ptr + R + partner, mask=inside, other=0.0).to(tl.float32)
    tl.store(rope_ptr + rope, turned(x, other, cos, sin, second).to(rope_ptr.dtype.element_ty), mask=inside)


@triton.jit
def write_index(
    x_ptr, weight_ptr, bias_ptr, table_row, key_ptr, scale_ptr,
    E: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_E: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One token's index key at `key_ptr` (fp8: its scale at `scale_ptr`)."""
    dims = tl.arange(0, BLOCK_E)
    mask = dims < E  # padded to a power of two
    partner, angle, second = pairs(dims, P, INTERLEAVED)
    x = tl.load(x_ptr + dims, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x) / E
    centred = tl.where(mask, x - mean, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centred * centred) / E + 1e-6)
    weight = tl.load(weight_ptr + dims, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + dims, mask=mask, other=0.0).to(tl.float32)
    key = centred * inverse * weight + bias
    turning = dims < P
    other = tl.load(x_ptr + partner, mask=turning, other=0.0).to(tl.float32)  # its row is hot: load it once more
    weight = tl.load(weight_ptr + partner, mask=turning, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + partner, mask=turning, other=0.0).to(tl.float32)
    cos = tl.load(table_row + angle, mask=turning, other=1.0)
    sin = tl.load(table_row + P // 2 + angle, mask=turning, other=0.0)
    key = tl.where(turning, turned(key, (other - mean) * inverse * weight + bias, cos, sin, second), key)
    if FP8:
        scale = scale_of(tl.max(tl.abs(key), 0))
        tl.store(key_ptr + dims, codes_of(key, scale), mask=mask)
        tl.store(scale_ptr, scale)
    else:
        tl.store(key_ptr + dims, key.to(key_ptr.dtype.element_ty), mask=mask)
