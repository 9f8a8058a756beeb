"""What a replay assumes: the tiers' sizes and the speed of what is not there."""

from dataclasses import dataclass

from benthic.common.errors import ConfigError
from benthic.common.layout import ceil_div
from benthic.common.units import MIB
from benthic.config.cache_options import L2_POLICIES

CHUNK_TOKENS = 8192  # the engine's default on a GPU: L1 keeps room for one chunk
SECOND_US = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Sizes are in pages of each lane; None: no limit. Raises ConfigError for what can't be, naming the flag."""

    owners: int = 1
    l1_pages: int | None = None
    l2_pages: int | None = None  # 0: no host tier
    l3_pages: int | None = None  # 0: no disk floor
    l2_policy: str = "write_through"
    l1_free_pages: int | None = None  # None: one prefill chunk, at most a quarter of L1
    page_tokens: int = 512
    page_bytes: int = 22 * MIB  # 512 tokens x 78 layers x 576 B, an 8-bit MLA cache
    max_running: int = 256
    prefill_tokens_per_s: float = 20_000  # of one request
    decode_tokens_per_s: float = 30  # of one request
    copy_gb_per_s: float = 50  # each way between L1 and L2, of each lane
    disk_gb_per_s: float = 3  # of each lane
    tick_ms: float = 10  # ticks are at least this far apart
    speed: float = 1  # arrivals come so many times as fast as they were recorded

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("--owners", self.owners, 1), ("--l1-pages", self.l1_pages, 1), ("--l2-pages", self.l2_pages, 0),
            ("--l3-pages", self.l3_pages, 0), ("--l1-free-pages", self.l1_free_pages, 0),
            ("--page-tokens", self.page_tokens, 1), ("--page-bytes", self.page_bytes, 1),
            ("--max-running", self.max_running, 1),
        ):  # fmt: skip
            if value is not None and value < least:
                raise ConfigError(f"{flag} {value}: must be at least {least}{_HINTS.get(flag, '')}")
        for flag, rate in (
            ("--prefill-tokens-per-s", self.prefill_tokens_per_s), ("--decode-tokens-per-s", self.decode_tokens_per_s),
            ("--copy-gb-per-s", self.copy_gb_per_s), ("--disk-gb-per-s", self.disk_gb_per_s),
            ("--tick-ms", self.tick_ms), ("--speed", self.speed),
        ):  # fmt: skip
            if not 0 < rate <= 1e9:
                raise ConfigError(f"{flag} {rate:g}: must be a number above 0")
        if self.l2_policy not in L2_POLICIES:
            raise ConfigError(f"--l2-policy {self.l2_policy}: must be one of {', '.join(L2_POLICIES)}")
        if self.l2_pages == 0 and self.l3_pages:
            raise ConfigError(
                f"--l3-pages {self.l3_pages} needs a host tier: L3 is filled from L2; give --l2-pages a size, "
                f"or leave it out for no limit"
            )
        if self.l1_pages is not None and (self.l1_free_pages or 0) >= self.l1_pages:
            raise ConfigError(
                f"--l1-free-pages {self.l1_free_pages}: L1 has {self.l1_pages} pages a lane; keep fewer free, "
                f"or raise --l1-pages"
            )

    @property
    def has_l2(self) -> bool:
        """Whether there is a host tier."""
        return self.l2_pages != 0

    @property
    def has_l3(self) -> bool:
        """Whether there is a disk floor: L3 is filled from L2, so without L2 there is none."""
        return self.has_l2 and self.l3_pages != 0

    @property
    def watermark(self) -> int:
        """Pages of each L1 lane that background eviction keeps free."""
        if self.l1_pages is None:
            return 0
        if self.l1_free_pages is not None:
            return self.l1_free_pages
        return min(ceil_div(CHUNK_TOKENS, self.page_tokens * self.owners), self.l1_pages // 4)

    @property
    def copy_us_per_page(self) -> int:
        """Between L1 and L2, at least 1."""
        return max(1, round(self.page_bytes / (self.copy_gb_per_s * 1e9) * SECOND_US))

    @property
    def disk_us_per_page(self) -> int:
        """To or from the disk, at least 1."""
        return max(1, round(self.page_bytes / (self.disk_gb_per_s * 1e9) * SECOND_US))

    @property
    def compute_us_per_page(self) -> int:
        """Prefill of a page, at least 1."""
        return max(1, round(self.page_tokens / self.prefill_tokens_per_s * SECOND_US))

    @property
    def tick_us(self) -> int:
        """The least time between two ticks."""
        return max(1, round(self.tick_ms * 1000))

    def service_us(self, computed_tokens: int, output_tokens: int) -> int:
        """From a request's start of computing to its last token."""
        seconds = computed_tokens / self.prefill_tokens_per_s + output_tokens / self.decode_tokens_per_s
        return round(seconds * SECOND_US)


_HINTS = {
    "--l1-pages": "; leave it out for no limit",
    "--l2-pages": ": 0 switches L2 off, left out it has no limit",
    "--l3-pages": ": 0 switches L3 off, left out it has no limit",
}
