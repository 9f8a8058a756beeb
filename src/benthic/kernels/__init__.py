"""Own kernels, one folder an operation: `__init__` checks and chooses, `reference` is torch, `kernel` Triton."""
