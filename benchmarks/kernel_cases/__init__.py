"""What `benchmarks.kernels` times, a module for each group of kernels."""
