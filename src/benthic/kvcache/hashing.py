"""Content hashes of pages: `h_i = SHA-256(h_{i-1} || tokens of page i)`, from the namespace and the cache salt on.

Equal hashes at page i mean equal prefixes up to i, so a hash is a page's identity in every tier and on every rank. Runs
outside the tick: in the server process for a prompt, incrementally while decoding.
"""

from array import array
from hashlib import sha256

HASH_BYTES = 32
TOKEN_BYTES = 4  # little-endian int32
BIGRAM_BYTES = 8  # two of them: the token, then the one after it


def root_hash(namespace: bytes, cache_salt: str | None) -> bytes:
    """Where the chain of a request's hashes starts: requests with different salts share no page."""
    return sha256(namespace + (cache_salt or "").encode()).digest()


def extend(prev: bytes, page_tokens: bytes | memoryview) -> bytes:
    """The hash of one more page, given the hash before it (the root hash for page 0) and the page's tokens."""
    return sha256(prev + page_tokens).digest()


def page_hashes(
    root: bytes, token_ids: bytes | memoryview, page_size: int, *, token_bytes: int = TOKEN_BYTES
) -> list[bytes]:
    """The hashes of the whole pages of a sequence; a tail shorter than a page has none.

    `token_ids` are little-endian int32; for bigrams pass their bytes and `token_bytes=BIGRAM_BYTES`. To go on behind
    page i, pass its hash as `root` and the tokens after it. Raises ValueError for bytes that are no whole tokens.
    """
    view = memoryview(token_ids).cast("B")
    if len(view) % token_bytes:
        raise ValueError(f"{len(view)} bytes are no whole number of tokens of {token_bytes} bytes")
    page_bytes = page_size * token_bytes
    if page_bytes <= 0:
        raise ValueError(f"page size must be at least 1 token, got {page_size}")
    prev = root
    hashes: list[bytes] = []
    for start in range(0, len(view) - page_bytes + 1, page_bytes):
        prev = sha256(prev + view[start : start + page_bytes]).digest()
        hashes.append(prev)
    return hashes


def bigrams(token_ids: "array[int]") -> "array[int]":
    """The pairs (t_i, t_{i+1}) of an int32 array, as an int64 array one shorter: t_i low, t_{i+1} high.

    A page of a draft layer's KV depends on one token more than it holds, so such pages are hashed over pairs.
    Converting commutes with cutting off a prefix, `bigrams(ids[m:]) == bigrams(ids)[m:]` for m >= 0, so a suffix
    hashes as it was stored. Raises ValueError unless the items have 4 bytes.
    """
    if token_ids.itemsize != TOKEN_BYTES:
        raise ValueError(f"token ids must be 4-byte integers, got {token_ids.itemsize} bytes")
    count = max(0, len(token_ids) - 1)
    interleaved = array("i", bytes(count * BIGRAM_BYTES))
    interleaved[0::2] = token_ids[:count]
    interleaved[1::2] = token_ids[1:]
    pairs = array("q")
    pairs.frombytes(interleaved.tobytes())
    return pairs
