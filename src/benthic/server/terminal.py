"""What `benthic serve` shows: progress bars while it loads, then the start-up table, the address and a line to try."""

import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from benthic.messages import Derived

WIDTH = 140  # characters of the table in a file or pipe


class Terminal:
    """Owns the two consoles and the bars. Bars go to standard error, what one may want to read or pipe to standard
    output."""

    def __init__(self, out: Console | None = None, err: Console | None = None) -> None:
        self._out = out or Console(width=None if sys.stdout.isatty() else WIDTH)
        self._err = err or Console(stderr=True)
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._told: set[tuple[str, int]] = set()

    def line(self, text: str) -> None:
        """One line, at once."""
        self._out.print(Text(text), soft_wrap=True)

    def progress(self, what: str, done: int, total: int) -> None:
        """Move a bar. Where nobody watches, the beginning and the end are a line each."""
        if not self._err.is_terminal:
            percent = 100 * done // max(1, total)
            if percent in (0, 100) and (what, percent) not in self._told:
                self._told.add((what, percent))
                self._err.print(Text(f"{what}: {percent} %"), soft_wrap=True)
            return
        if self._bars is None:
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
            self._bars = Progress(*columns, console=self._err)
            self._bars.start()
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total)
        self._bars.update(self._tasks[what], completed=done, total=total)

    def stop_progress(self) -> None:
        """Leave the bars as they stand."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def ready(self, model: str, url: str, rows: Sequence[Derived], *, chat: bool, key: bool) -> None:
        """The table, the address and a command to copy."""
        self.stop_progress()
        table = Table("setting", "value", "why")
        for row in rows:
            table.add_row(Text(row.name), Text(row.value), Text(row.reason))
        self._out.print(table)
        self.line(f"{model} is ready at {url}. Try:")
        self.line("  " + example_command(model, url, chat=chat, key=key))


def example_command(model: str, url: str, *, chat: bool, key: bool) -> str:
    """A curl line that works as it stands."""
    header = ' -H "Authorization: Bearer $BENTHIC_API_KEY"' if key else ""
    if chat:
        path = "chat/completions"
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        body: dict[str, object] = {"model": model, "messages": messages, "temperature": 0}
    else:
        path = "completions"
        body = {"model": model, "prompt": "The capital of France is", "max_tokens": 32, "temperature": 0}
    data = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    return f"curl {url}/v1/{path} -H 'Content-Type: application/json'{header} -d '{data}'"
