"""What the TPU compiler says of a program: compile time, memory on each chip, collectives."""

import argparse
import collections
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from shardzoo.cli.topology import COLLECTIVE

GIB = 2**30


class Described(NamedTuple):
    """What is printed of a program, and the CPU seconds that compiling it took."""

    text: str
    cpu: float


def describe(run: Callable, *arguments: Any, **named: Any) -> str:
    """What `compiled` says, as text."""
    return compiled(run, *arguments, **named).text


def compiled(run: Callable, *arguments: Any, **named: Any) -> Described:
    """Compiles `run`, a function or a jitted one, for abstract arguments. Sizes are GiB per chip.

    `peak` is of arguments, results and temporaries together.
    """
    begin = time.perf_counter()
    lowered = (run if hasattr(run, "lower") else jax.jit(run)).lower(*arguments, **named)
    traced, cpu = time.perf_counter(), time.process_time()
    program = lowered.compile()
    done, cpu = time.perf_counter(), time.process_time() - cpu
    memory = program.memory_analysis()
    found = collections.Counter(COLLECTIVE.findall(program.as_text()))
    counts = ", ".join(f"{n} {kind}" for kind, n in sorted(found.items()) if n)
    sizes = {
        "arguments": memory.argument_size_in_bytes,
        "results": memory.output_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "peak": memory.peak_memory_in_bytes,
    }
    shown = "  ".join(f"{name} {size / GIB:5.2f}" for name, size in sizes.items())
    times = f"trace {traced - begin:4.1f} s  compile {done - traced:5.1f} s ({cpu:5.1f} of CPU)"
    return Described(f"{times}  {shown} GiB  ({counts})", cpu)


def main(doc: str | None, cases: Mapping[str, tuple], measure: Callable[[str], str]) -> None:
    """Prints a line for each case named on the command line, or for all of them."""
    report(parser(doc, cases).parse_args().names, cases, measure)


def parser(doc: str | None, cases: Mapping[str, tuple]) -> argparse.ArgumentParser:
    """Of a command line that names cases."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("names", nargs="*", choices=[*cases, []], metavar="NAME", help=", ".join(cases))
    return made


def report(names: Sequence[str], cases: Mapping[str, tuple], measure: Callable[[str], str]) -> None:
    """Prints a line for each of the names, or for all cases."""
    for name in names or cases:
        print(f"{name:22} {cases[name][0]:10} {measure(name)}", flush=True)
