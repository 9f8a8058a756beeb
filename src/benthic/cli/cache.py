"""`benthic cache`: look at a disk floor's folder, check every page in it, empty it.

`ls` and `stat` may be used while a server runs: they read the indexes through LMDB's snapshots. `verify` and `clear`
need the folder to themselves and say who holds it. Only `clear` changes anything.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benthic.common.units import format_size
from benthic.tiers.disk.io import SystemDisk
from benthic.tiers.disk.lock import Holder, holder_of, lock_folders, lock_for_reading
from benthic.tiers.disk.refusal import refusal
from benthic.tiers.disk.survey import (
    Damage,
    NamespaceSurvey,
    SlabSurvey,
    choose,
    index_folders,
    namespaces,
    remove_namespace,
    survey_slabs,
    verify,
)

_SHOWN_DIGITS = 12  # of a namespace: enough to choose one by
_HELP = "The disk floor's folder (--l3-dir): what it holds, whether it is whole, and how to free its room."

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder that `benthic serve --l3-dir` was given.")]
Chosen = Annotated[
    str | None, typer.Option("--namespace", metavar="HEX", help="One model's pages: its first digits. Default: all.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")]


def register(app: typer.Typer) -> None:
    """Add `cache ls`, `cache stat`, `cache verify` and `cache clear` to `app`."""
    group = typer.Typer(no_args_is_help=True, help=_HELP)
    group.command("ls")(list_namespaces)
    group.command("stat")(show_namespaces)
    group.command("verify")(verify_namespaces)
    group.command("clear")(clear_namespaces)
    app.add_typer(group, name="cache")


def list_namespaces(folder: Folder, namespace: Chosen = None, as_json: AsJson = False) -> None:
    """List the models and settings whose pages lie in DIR, with their sizes. Works beside a running server.

    Example: benthic cache ls /data/kv
    """
    with _reading(folder):
        found = choose(namespaces(folder), namespace, folder)
        holder = holder_of(folder)
    if as_json:
        _print_json({"folder": str(folder), "held_by": _told(holder), "namespaces": [_row(one) for one in found]})
        return
    table = Table("namespace", "size", "slabs", "what it is")
    for one in found:
        table.add_row(one.name[:_SHOWN_DIGITS], format_size(one.num_bytes), str(one.num_slabs), escape(_words(one)))
    Console().print(table if found else f"{escape(str(folder))} holds no pages")
    _print_holder(holder)


def show_namespaces(folder: Folder, namespace: Chosen = None, as_json: AsJson = False) -> None:
    """Show slots, pages and ages of each slab file in DIR. Works beside a running server.

    Example: benthic cache stat /data/kv --namespace 3f9a
    """
    with _reading(folder):
        found = choose(namespaces(folder), namespace, folder)
        holder = holder_of(folder)
        slabs = [survey_slabs(one, live=holder is not None) for one in found]
    if as_json:
        rows = [{**_row(one), "slabs": [_slab_row(s) for s in own]} for one, own in zip(found, slabs, strict=True)]
        _print_json({"folder": str(folder), "held_by": _told(holder), "namespaces": rows})
        return
    console = Console()
    for one, own in zip(found, slabs, strict=True):
        console.print(_slab_table(one, own))
    if not found:
        console.print(f"{escape(str(folder))} holds no pages")
    _print_holder(holder)


def verify_namespaces(folder: Folder, namespace: Chosen = None, as_json: AsJson = False) -> None:
    """Read every page in DIR and compare it with its checksum; exit code 1 if anything is damaged.

    Needs the server stopped, changes nothing. A damaged page costs no more than its recomputation: a running server
    finds it at the next read. Example: benthic cache verify /data/kv
    """
    with _reading(folder):
        found = choose(namespaces(folder), namespace, folder)
        lock = lock_for_reading(folder)
        try:
            damaged = {one.name: _verify(one) for one in found}
            pages = {one.name: sum(s.num_pages for s in survey_slabs(one, live=False)) for one in found}
        finally:
            lock.release()
    bad = any(damaged.values()) or any(one.damaged for one in found)
    if as_json:
        rows = [
            {**_row(one), "pages": pages[one.name], "damaged": [_damage_row(d) for d in damaged[one.name]]}
            for one in found
        ]
        _print_json({"folder": str(folder), "namespaces": rows})
    else:
        for one in found:
            _print_verdict(one, pages[one.name], damaged[one.name])
    if bad:
        raise typer.Exit(1)


def clear_namespaces(folder: Folder, namespace: Chosen = None, as_json: AsJson = False) -> None:
    """Remove one model's pages from DIR, or all. Refused while a server uses the folder.

    Example: benthic cache clear /data/kv --namespace 3f9a
    """
    with _reading(folder):
        found = namespaces(folder)  # first: no lock file is made in a folder that is none of ours
        lock = lock_folders([folder, *index_folders(found)], "benthic cache clear", make=False)
        try:
            found = choose(namespaces(folder), namespace, folder)
            left = {one.name: remove_namespace(one, SystemDisk()) for one in found}
        finally:
            lock.release()
    if as_json:
        rows = [{**_row(one), "left": left[one.name]} for one in found]
        _print_json({"folder": str(folder), "removed": rows, "num_bytes": sum(one.num_bytes for one in found)})
        return
    console = Console()
    for one in found:
        console.print(escape(f"removed {one.name[:_SHOWN_DIGITS]}: {format_size(one.num_bytes)}, {_words(one)}"))
        if left[one.name]:
            console.print(escape(f"  left alone, not the cache's own: {', '.join(left[one.name])}"))
    if not found:
        console.print(f"{escape(str(folder))} holds no pages: nothing to remove")


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """What the filesystem refuses becomes one sentence."""
    try:
        yield
    except OSError as error:
        path = Path(str(error.filename)) if error.filename else folder
        raise refusal("read or change", path, error) from error


def _verify(one: NamespaceSurvey) -> list[Damage]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(f"reading {one.name[:_SHOWN_DIGITS]}", total=None)
        return list(verify(one, SystemDisk(), lambda done, total: bar.update(task, completed=done, total=total)))


def _print_verdict(one: NamespaceSurvey, num_pages: int, damaged: Sequence[Damage]) -> None:
    console = Console()
    name = one.name[:_SHOWN_DIGITS]
    if one.problem:
        console.print(f"{name}: {escape(one.problem)}")
    if not damaged:
        if not one.damaged:
            console.print(f"{name}: {num_pages} pages, all whole")
        return
    console.print(f"{name}: {num_pages} pages, {len(damaged)} findings")
    table = Table("file", "slot", "hash", "damage")
    for one_damage in damaged:
        slot = "" if one_damage.slot < 0 else str(one_damage.slot)
        table.add_row(escape(one_damage.path.name), slot, one_damage.content_hash.hex(), escape(one_damage.kind))
    console.print(table)


def _slab_table(one: NamespaceSurvey, slabs: Sequence[SlabSurvey]) -> Table:
    title = f"{one.name[:_SHOWN_DIGITS]}  {format_size(one.num_bytes)}  {_words(one)}"
    table = Table("file", "slots", "pages", "full", "ages", "note", title=escape(title), title_justify="left")
    for slab in slabs:
        full = f"{slab.num_pages / slab.num_slots:.0%}" if slab.num_slots else ""
        ages = "" if slab.ages is None else f"{slab.ages[0]} … {slab.ages[1]}"
        table.add_row(
            slab.path.name, str(slab.num_slots), str(slab.num_pages), full, ages, escape(slab.problem)
        )  # fmt: skip
    return table


def _words(one: NamespaceSurvey) -> str:
    if one.manifest is None:
        return one.problem
    words = ", ".join(f"{key} {value}" for key, value in one.manifest.words.items())
    return f"{one.problem}; {words}" if one.problem else words


def _row(one: NamespaceSurvey) -> dict[str, Any]:
    geometry = None if one.manifest is None else asdict(one.manifest.geometry)
    words = {} if one.manifest is None else one.manifest.words
    return {
        "namespace": one.name, "num_bytes": one.num_bytes, "num_slabs": one.num_slabs, "words": words,
        "geometry": geometry, "problem": one.problem,
    }  # fmt: skip


def _slab_row(slab: SlabSurvey) -> dict[str, Any]:
    return {**asdict(slab), "path": str(slab.path), "index": str(slab.index)}


def _damage_row(damage: Damage) -> dict[str, Any]:
    hexed = damage.content_hash.hex()
    return {"file": str(damage.path), "slot": damage.slot, "hash": hexed, "kind": damage.kind}


def _told(holder: Holder | None) -> str | None:
    return None if holder is None else str(holder)


def _print_holder(holder: Holder | None) -> None:
    if holder is not None:
        Console().print(f"in use by {escape(str(holder))}")


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value))
