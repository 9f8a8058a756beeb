"""A whole engine of a checkpoint folder in this process, asked in token ids; tiers as its options say."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benthic.config import options_from_mapping, resolve
from benthic.engine.build import build_engine
from benthic.kvcache import page_hashes, root_hash
from benthic.messages import FlushCache, Outputs, SamplingParams, Submit
from benthic.tiers.disk.io import DiskIO
from benthic.weights.locate import locate


@dataclass(frozen=True)
class Told:
    """One greedy answer, and how many tokens of its prompt came from L1, L2 and L3."""

    tokens: list[int]
    cached: tuple[int, int, int]


class RealEngine:
    """Use as a context manager, so that the floor's files are free for the next one."""

    def __init__(self, folder: Path, *, disk_io: DiskIO | None = None, **options: object) -> None:
        """`disk_io` stands in for the system's under L3."""
        given = {"model": str(folder), "device": "cpu", "dtype": "float32", "page_size": 16, "seed": 1, **options}
        config = resolve(options_from_mapping(given, "test")).engine
        self.engine, self.ready = build_engine(config, locate(str(folder)), disk_io=disk_io)
        self._next = 0

    def ask(self, prompts: Sequence[Sequence[int]], max_tokens: int = 6) -> list[Told]:
        """All at once; when the answers are there, copies and spills are over."""
        root = root_hash(self.ready.namespace, None)
        first, self._next = self._next, self._next + len(prompts)
        out: dict[int, list[int]] = {first + i: [] for i in range(len(prompts))}
        cached: dict[int, tuple[int, int, int]] = {}
        messages = []
        for i, prompt in enumerate(prompts):
            data = np.array(prompt, np.int32).tobytes()
            hashes = b"".join(page_hashes(root, data, self.ready.page_size))
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
            messages.append(Submit(id=first + i, prompt=data, root=root, hashes=hashes, params=params))
        replies = self.engine.tick(list(messages))
        while True:
            for reply in replies:
                if isinstance(reply, Outputs):
                    cached |= {p.id: (p.cached_l1, p.cached_l2, p.cached_l3) for p in reply.prefilled}
                    tokens = np.frombuffer(reply.tokens, np.int32).tolist()
                    for i, token in zip(np.frombuffer(reply.ids, np.int64).tolist(), tokens, strict=True):
                        out[i].append(token)
            if self.engine.idle:
                break
            time.sleep(self.engine.pause_s)
            replies = self.engine.tick([])
        return [Told(out[i], cached[i]) for i in out]

    def flush(self, *tiers: str) -> None:
        """Drop what these tiers hold."""
        self.engine.tick([FlushCache(0, tiers)])

    def row(self, name: str) -> str:
        """What the start-up table says of `name`: the value, and the reason in brackets."""
        found = next(row for row in self.ready.table if row.name == name)
        return f"{found.value} ({found.reason})"

    def __enter__(self) -> "RealEngine":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.engine.close()
