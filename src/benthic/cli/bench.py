"""`benthic bench`: the group of benchmarks, one file each."""

import typer

from benthic.cli import bench_offline, bench_serve


def register(app: typer.Typer) -> None:
    """Add `bench serve` and `bench offline` to `app`."""
    group = typer.Typer(no_args_is_help=True, help="Measure a running server, or the engine in this process.")
    bench_serve.register(group)
    bench_offline.register(group)
    app.add_typer(group, name="bench")
