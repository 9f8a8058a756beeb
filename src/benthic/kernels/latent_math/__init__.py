"""What the kernels around latents share: turning a rope part, and e4m3 codes with a float32 scale."""

from benthic.kernels.latent_math.reference import E4M3_MAX, SCALE_FLOOR, quantise_e4m3, turn_rope

__all__ = ["E4M3_MAX", "SCALE_FLOOR", "quantise_e4m3", "turn_rope"]
