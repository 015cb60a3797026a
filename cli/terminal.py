"""What commands write: results to standard output, progress and errors to standard error.

Progress is drawn on a terminal only; everything else is plain text, so that output can be piped and kept.
"""

import contextlib
import json
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar
from rich.table import Table

from shardzoo.progress import Progress

BAR_AFTER = 1.0  # seconds of work before a bar is worth its flicker
WIDE = 120  # columns that leave room for the name of what is worked on
REPORT = 100  # columns of a report
PIPED_WIDTH = 10_000  # columns: no line of a piped table is folded


def error_console() -> Console:
    return Console(stderr=True, highlight=False)


def say(text: str) -> None:
    """One line of a result, as it is (no markup)."""
    print(text)


def folded(line: str) -> str:
    """A line of a report in as many of at most `REPORT` columns as it needs, the further ones set in."""
    indent = len(line) - len(line.lstrip()) + 2
    return "\n".join(textwrap.wrap(line, REPORT, subsequent_indent=" " * indent, break_long_words=False)) or line


def note(text: str) -> None:
    """A remark beside the result."""
    print(text, file=sys.stderr)


def complain(message: str) -> None:
    """The message of an error, with a red `error:` on a terminal."""
    console = error_console()
    console.print("error:", style="bold red", end=" ")
    console.print(message, markup=False, soft_wrap=True)


def say_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def say_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table without rules; headings that start with `>` are of right-aligned columns."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        right = heading.startswith(">")
        table.add_column(heading.lstrip(">"), justify="right" if right else "left", overflow="fold", no_wrap=not right)
    for row in rows:
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPED_WIDTH)
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def size_text(count: int | float) -> str:
    """Bytes in the largest binary unit that leaves at least one of it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def count_text(count: int) -> str:
    """A number of parameters: 135 M, 14.3 B."""
    for step, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= step:
            return f"{count / step:.3g} {unit}"
    return str(count)


@contextlib.contextmanager
def progress_bar(title: str, *, steps: bool = False) -> Iterator[Progress | None]:
    """The callback that draws a bar called `title`, of bytes or of `steps`.

    None where nobody watches (standard error is not a terminal).
    """
    console = error_console()
    if not console.is_terminal:
        yield None
        return
    counts: list[ProgressColumn] = (
        [MofNCompleteColumn()] if steps else [DownloadColumn(binary_units=True), TransferSpeedColumn()]
    )
    columns = [TextColumn("{task.description}"), BarColumn(), *counts]
    columns += [TimeRemainingColumn(), TextColumn("{task.fields[what]}")][: 2 if console.width >= WIDE else 1]
    bar = Bar(*columns, console=console, transient=True)
    begin, task = time.monotonic(), bar.add_task(title, start=True, total=None, what="")

    def update(done: int, total: int, what: str, /) -> None:
        if time.monotonic() - begin > BAR_AFTER:
            bar.start()
        bar.update(task, completed=done, total=total, what=what)

    try:
        yield update
    finally:
        bar.stop()


@contextlib.contextmanager
def working(title: str) -> Iterator[None]:
    """A moving sign, on a terminal, while something works that cannot say how far it is."""
    with contextlib.ExitStack() as stack:
        if error_console().is_terminal:
            stack.enter_context(error_console().status(title))
        yield
