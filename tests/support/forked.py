"""Runs functions in processes forked from one that has everything imported, so that they start in milliseconds.

Killing such a child is killing any process: nothing of it is left but what it wrote.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

_SERVER = """
import os, sys, signal
from shardzoo.cli.interrupts import strike_again
signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.unraisablehook = strike_again  # as the command line does: a Ctrl-C in a destructor is not lost
{imports}
print("ready", flush=True)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        status = 0
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            print(os.getpid(), flush=True)
            exec(line.strip().replace(chr(0), chr(10)))
        except KeyboardInterrupt:
            status = 130
        except InputError as error:
            print(error, file=sys.stderr, flush=True)
            status = 1
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Forks:
    """A process to fork from; use as a context manager.

    Args:
        imports: statements that it runs once.
        errors: file that children's standard error goes to.
    """

    def __init__(self, imports: str, errors: Path):
        program = textwrap.dedent(_SERVER).format(imports=textwrap.dedent(imports))
        self._errors = errors
        self._server = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(errors, "w"),  # noqa: SIM115 (the process holds it)
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        assert self._server.stdout.readline() == "ready\n", errors.read_text()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stdin.close()
        self._server.wait(timeout=60)

    def run(self, program: str, *, kill: signal.Signals | None = None, after: float = 0.0) -> int:
        """Runs a program in a child, sends it `kill` `after` seconds, and returns its exit status."""
        self._server.stdin.write(program.replace("\n", "\0") + "\n")
        self._server.stdin.flush()
        child = int(self._server.stdout.readline())
        if kill is not None:
            time.sleep(after)
            with contextlib.suppress(ProcessLookupError):  # it was done already
                os.kill(child, kill)
        return int(self._server.stdout.readline())

    def errors(self) -> str:
        """What children have written to standard error."""
        return self._errors.read_text()


class Moments:
    """Times of `count` kills, spread over a run of `longest` seconds: earlier ones first.

    Other work on the machine makes `longest` long once and not again: `too_late` says that a run ended before its kill.
    """

    def __init__(self, count: int, longest: float, seed: int):
        self._count, self._longest, self._random = count, longest, random.Random(seed)

    def __iter__(self) -> Iterator[float]:
        for i in range(self._count):
            yield self._longest * (i + self._random.random()) / self._count

    def too_late(self, after: float) -> None:
        self._longest = min(self._longest, after)
