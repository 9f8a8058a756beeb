"""Sparse latent attention for Hopper, in Gluon: `latent_prefill` and `latent_decode` over selected positions.

Keys are the rows of the scores and latents the rows of the result, heads the columns of both, so that 32 heads are no
less than a tensor-core tile. A tile of latents is gathered once, serves as keys and as values, and is gathered while
the tile before it is worked on: Triton's own pipeline would start it only when that work is done.
Limits: 16-bit pools (decode takes fp8 ones of rank 512 too), rank a power of two from 64, rope part 64, 32 or 64 heads
a program, sm_90.
"""
