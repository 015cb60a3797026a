"""Several programs for the same work, each in a process of its own, timed in turn with all cores."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence


def serve(call: Callable[[], object]) -> None:
    """Runs `call` once for each line that comes in, and answers with the seconds."""
    call()
    print("ready", flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        call()
        print(time.perf_counter() - begin, flush=True)


def medians(commands: Mapping[str, Sequence[str]], repeats: int) -> dict[str, float]:
    """Median seconds of each program, which `serve`s."""
    running = {
        side: subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for side, command in commands.items()
    }
    times: dict[str, list[float]] = {side: [] for side in running}
    for process in running.values():
        _answer(process)
    for _ in range(repeats):
        for side, process in running.items():
            print(file=process.stdin, flush=True)
            times[side].append(float(_answer(process)))
    for process in running.values():
        process.stdin.close()
        process.wait()
    return {side: statistics.median(seconds) for side, seconds in times.items()}


def _answer(process: subprocess.Popen) -> str:
    line = process.stdout.readline().strip()
    if not line:
        raise SystemExit(f"{' '.join(map(str, process.args))} ended with status {process.wait()}")
    return line
