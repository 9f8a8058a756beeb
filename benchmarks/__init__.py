"""One file a figure: `python -m benchmarks.<figure> [--json]`. Each checks its answer before it reports a time."""
