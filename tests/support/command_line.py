"""Running commands: in this process, or as a user does."""

import dataclasses
import os
import subprocess
import sys

from typer.testing import CliRunner

from shardzoo.cli.app import app


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str


def invoke(*arguments: object, text: str | None = None) -> Ended:
    """A command in this process; `text` is its standard input. An error that it does not handle is raised."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=text, prog_name="shardzoo")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ended(result.exit_code, result.stdout, result.stderr)


def environment(**changed: str) -> dict[str, str]:
    """The environment of a user with no settings of JAX but the platform."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_"))}
    return {**kept, "JAX_PLATFORMS": "cpu", **changed}


def start(*arguments: object, **options) -> subprocess.Popen:
    """A command in a process of its own, with its output in pipes."""
    words = [sys.executable, "-m", "shardzoo", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, **{**pipes, "env": environment(), **options})


def run(*arguments: object, **options) -> Ended:
    """A command in a process of its own, to its end."""
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=300)
    return Ended(process.returncode, out, err)
