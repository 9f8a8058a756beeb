"""How a model turns positions into angles, as one frozen value, read from either of config.json's spellings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benthic.common.errors import ModelError
from benthic.weights.fields import Fields, given

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base, kind of scaling and the numbers of that kind. Which pairs turn is the layer's business.

    `factor` counts for every kind but default, the frequency factors for llama3 only, the betas and mscales for yarn
    only, `original_max_position` (tokens) for llama3 and yarn.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    @property
    def angle_gain(self) -> float:
        """What cosine and sine are multiplied by: 1 unless yarn has two different mscales."""
        return self._gain(self.mscale) / self._gain(self.mscale_all_dim)

    @property
    def softmax_gain(self) -> float:
        """What the softmax scale is multiplied by: 1 unless yarn has an mscale_all_dim."""
        gain = self._gain(self.mscale_all_dim)
        return gain * gain

    def _gain(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.kind == "yarn" else 1.0


def read_rope(fields: Fields, kinds: Sequence[RopeKind], default_theta: float | None) -> RopeConfig:
    """`rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (before). Raises ModelError.

    `kinds`: what the architecture supports. `default_theta` None: the base must be there.
    """
    raw = fields.raw
    spelling = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    scaling = raw.get(spelling) or {}
    if not isinstance(scaling, dict):
        raise fields.bad(spelling, "a table")
    rope = Fields(
        {**given(raw, "rope_theta"), **given(scaling, "rope_theta"), **_rest(scaling)}, fields.where, "rope: "
    )
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in kinds:
        raise ModelError(f"{fields.where}: rope type {kind!r} is not supported; supported: {', '.join(kinds)}")
    for partial in (raw.get("partial_rotary_factor"), scaling.get("partial_rotary_factor")):
        if partial not in (None, 1, 1.0):
            raise ModelError(f"{fields.where}: partial_rotary_factor: expected 1, found {partial!r}")
    theta = rope.number("rope_theta", default_theta, 1.0, 1e12)
    if kind == "default":
        return RopeConfig(theta=theta)
    if not rope.given("factor"):
        raise rope.bad("factor", f"a number, which rope type {kind} needs")
    factor = rope.number("factor", 1.0, 1.0, 1e6)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    return _llama3(rope, theta, factor) if kind == "llama3" else _yarn(rope, theta, factor)


def _rest(scaling: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in scaling.items() if key != "rope_theta"}


def _llama3(rope: Fields, theta: float, factor: float) -> RopeConfig:
    low, high = rope.number("low_freq_factor", 1.0, 1e-3, 1e6), rope.number("high_freq_factor", 4.0, 1e-3, 1e6)
    if high <= low:
        raise rope.bad("high_freq_factor", f"more than low_freq_factor, {low}")
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=rope.count("original_max_position_embeddings"),
    )


def _yarn(rope: Fields, theta: float, factor: float) -> RopeConfig:
    fast, slow = rope.number("beta_fast", 32.0, 1e-3, 1e6), rope.number("beta_slow", 1.0, 1e-3, 1e6)
    if fast <= slow:
        raise rope.bad("beta_fast", f"more than beta_slow, {slow}")
    if theta == 1.0:
        raise rope.bad("rope_theta", "more than 1, as rope type yarn divides by its logarithm")
    rope.demand("truncate", True, ": yarn with fractional limits is not supported")
    if rope.given("attention_factor"):
        raise rope.bad("attention_factor", "nothing: mscale and mscale_all_dim say it")
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=rope.count("original_max_position_embeddings"),
        beta_fast=fast,
        beta_slow=slow,
        mscale=rope.number("mscale", 1.0, 0.0, 100.0),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0, 0.0, 100.0),
    )
