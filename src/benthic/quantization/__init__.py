"""Weights that are stored in fewer bits: their formats, and a reader that shows them as plain tensors."""

from benthic.quantization.fp8 import dequantise_fp8, quantise_fp8
from benthic.quantization.reader import DequantisingReader

__all__ = ["DequantisingReader", "dequantise_fp8", "quantise_fp8"]
