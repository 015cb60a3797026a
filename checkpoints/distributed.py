"""Processes that work on one checkpoint: starting them, exchanging small values, and time-outs that name who is late.

Values travel through JAX's coordination service, not through device collectives: a process that died or fell behind
ends in an error on the others after `timeout` seconds and never in a hang.
"""

import collections
import contextlib
import itertools
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import distributed as _service  # the coordination client has no public name
from jax.errors import JaxRuntimeError

from shardzoo.errors import InputError

TIMEOUT = 600.0  # seconds to wait for other processes
_RELAY = 10.0  # seconds more for the first process to tell the others who was late
_LINE = 2.0  # seconds that a connection has to say which process it is
_rounds: dict[str, itertools.count] = collections.defaultdict(itertools.count)  # of each lane


class ProcessTimeout(RuntimeError):
    """Some processes did not arrive in time; the message names them."""


def initialize(
    coordinator: str,
    processes: int,
    process: int,
    *,
    timeout: float = 300.0,
    shutdown_timeout: float = 30.0,
    heartbeat_timeout: float = 100.0,
) -> None:
    """Joins `processes` processes into one JAX program, on CPU with gloo collectives; before any other use of JAX.

    Args:
        coordinator: "host:port" of process 0, reachable from all.
        timeout: seconds to wait for the others.
        shutdown_timeout: seconds that a process waits for the others at its end.
        heartbeat_timeout: seconds after which JAX ends all processes because one of them gives no sign of life.

    Raises:
        InputError: numbers or an address that do not fit together.
        ProcessTimeout: not all processes came; names those that did not.
    """
    host, _, port = coordinator.rpartition(":")
    if not 0 <= process < processes:
        raise InputError(f"distributed: process={process} is not among processes={processes}: number them from 0")
    if not host or not port.isdecimal():
        raise InputError(f"distributed: coordinator={coordinator!r} is not host:port of process 0: give that")
    if process == 0:
        _gather(int(port), processes, timeout)
    else:
        _report(host, int(port), process, timeout)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator_address=coordinator,
        num_processes=processes,
        process_id=process,
        initialization_timeout=max(1, round(timeout)),
        shutdown_timeout_seconds=max(1, round(shutdown_timeout)),
        heartbeat_timeout_seconds=max(1, round(heartbeat_timeout)),
    )


def _gather(port: int, processes: int, timeout: float) -> None:
    """Process 0 waits for a connection from each other process; JAX itself would end the program without saying who.

    Each sends its number as a line, and gets back the numbers of those that did not come, as JSON.
    """
    deadline = time.monotonic() + timeout
    come: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("", port)))
        while len(come) < processes - 1 and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            with contextlib.suppress(TimeoutError):
                connection = server.accept()[0]
                number = _number(connection)
                if number in range(1, processes):
                    come[number] = stack.enter_context(connection)
                else:
                    connection.close()
        late = [p for p in range(1, processes) if p not in come]
        for connection in come.values():
            with contextlib.suppress(OSError):  # it died since; JAX's own start then runs out of time
                connection.sendall(json.dumps(late).encode() + b"\n")
    if late:
        raise _start_timeout(f"port {port}", late, processes, timeout)


def _number(connection: socket.socket) -> int:
    """The number that a process sends as soon as it is connected; -1 if this is not one, or it broke off."""
    connection.settimeout(_LINE)
    try:
        with connection.makefile() as lines:
            return int(lines.readline(16))
    except (OSError, ValueError):
        return -1


def _report(host: str, port: int, process: int, timeout: float) -> None:
    """Tells process 0 that this one is here, and waits until all are."""
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=left) as connection:
            connection.sendall(b"%d\n" % process)
            connection.settimeout(left + _RELAY)
            answer = connection.makefile().readline()
            if answer and (late := json.loads(answer)):
                raise _start_timeout(f"{host}:{port}", late, None, timeout)
            if answer:
                return
        time.sleep(0.1)
    raise _start_timeout(f"{host}:{port}", [0], None, timeout)


def _start_timeout(where: str, late: list[int], processes: int | None, timeout: float) -> ProcessTimeout:
    names, of = ", ".join(map(str, late)), f" of {processes}" if processes else ""
    return ProcessTimeout(
        f"distributed: process {names}{of} did not come to {where} within {timeout:g} s:"
        " start all processes, with the same coordinator and count"
    )


def share(what: str, value: Any, *, timeout: float | int = TIMEOUT, lane: str = "main") -> list[Any]:
    """Every process's JSON `value`, in process order, on every process; all call this in the same order.

    Threads that share beside each other, as a save in the background does, each have a `lane` with an order of its own.

    Raises:
        ProcessTimeout: a process did not arrive within `timeout` seconds; every other one is told which.
    """
    count, me = jax.process_count(), jax.process_index()
    if count == 1:
        return [value]
    number = next(_rounds[lane])
    key = f"shardzoo/{lane}/{number}/{what}"
    client = _service.global_state.client
    assert client is not None  # there are several processes, so this one has joined them
    if me == 0:
        got, late = _collect(client, key, value, count, timeout)
        client.key_value_set(f"{key}/all", json.dumps({"values": got, "late": late}))
        if number and not late:  # all have come here, so none reads the round before any more
            client.key_value_delete(f"shardzoo/{lane}/{number - 1}/")
    else:
        client.key_value_set(f"{key}/{me}", json.dumps(value))
        answer = _get(client, f"{key}/all", timeout + _RELAY)
        if answer is None:
            raise _timeout(what, [0], timeout)
        got, late = answer["values"], answer["late"]
    if late:
        raise _timeout(what, late, timeout)
    return got


def _collect(client, key: str, value: Any, count: int, timeout: float) -> tuple[list[Any], list[int]]:
    deadline = time.monotonic() + timeout
    got = [value]
    got += [_get(client, f"{key}/{p}", deadline - time.monotonic(), wrap=True) for p in range(1, count)]
    late = [p for p, v in enumerate(got) if v is None and p > 0]
    return [v[0] if p and v else v for p, v in enumerate(got)], late


def _get(client, key: str, seconds: float, *, wrap: bool = False) -> Any:
    """The value at `key`, or None if it is not there in time; `wrap` puts it in a list, for values that may be null."""
    try:
        found = json.loads(client.blocking_key_value_get(key, max(1, round(1000 * seconds))))
    except JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        if "UNAVAILABLE" not in str(error):
            raise
        raise ProcessTimeout(
            f"{key.rsplit('/', 2)[-2]}: process 0 of {jax.process_count()} is gone: see why it ended"
        ) from error
    return [found] if wrap else found


def _timeout(what: str, late: list[int], timeout: float) -> ProcessTimeout:
    names = ", ".join(map(str, late))
    return ProcessTimeout(
        f"{what}: process {names} of {jax.process_count()} did not arrive within {timeout:g} s:"
        " see whether it died, is stuck, or needs more time (timeout=)"
    )


def agree(
    what: str, problem: str | None, *, at: object = "", timeout: float | int = TIMEOUT, lane: str = "main"
) -> None:
    """Waits for all processes and fails on every one if any has a problem.

    Args:
        at: where, for the message alone: the same thing may lie at another path for each process.

    Raises:
        InputError: what went wrong, on which processes.
        ProcessTimeout: a process did not arrive in time.
    """
    fail_together(f"{what} {at}".rstrip(), share(what, problem, timeout=timeout, lane=lane))


@contextlib.contextmanager
def together(what: str, at: object = "", *, timeout: float | int = TIMEOUT) -> Iterator[dict[str, str]]:
    """Of what every process does for itself: an `InputError` on one of them is raised on all, none goes on alone.

    The body is given a dict: what it puts there has to be the same on every process.

    Raises:
        InputError: what went wrong, on which processes, or what is not the same on all.
        ProcessTimeout: a process did not arrive in time.
    """
    problem: str | None = None
    alike: dict[str, str] = {}
    try:
        yield alike
    except InputError as error:
        if jax.process_count() == 1:
            raise
        problem = str(error)
    parts = share(what, [problem, alike], timeout=timeout)
    fail_together(f"{what} {at}".rstrip(), [text for text, _ in parts])
    for name, value in parts[0][1].items():
        others = [p for p, (_, given) in enumerate(parts) if given.get(name) != value]
        if others:
            raise InputError(
                f"{what} {at}: {name} on process {', '.join(map(str, others))} is not that on process 0:"
                " give all of them the same"
            )


def fail_together(what: str, problems: list[str | None]) -> None:
    """Raises what went wrong on each process, in process order, where any text is not None or empty.

    Raises:
        InputError: on every process that has the same list, the same.
    """
    found = {p: text for p, text in enumerate(problems) if text}
    if not found:
        return
    if jax.process_count() == 1:
        raise InputError(found[0])
    distinct = dict.fromkeys(found.values())
    lines = [f"process {', '.join(str(p) for p in found if found[p] == text)}: {text}" for text in distinct]
    raise InputError("\n  ".join([f"{what}:", *lines]))


def barrier(what: str, *, timeout: float | int = TIMEOUT) -> None:
    """Waits until every process has come here.

    Raises:
        ProcessTimeout: a process did not arrive within `timeout` seconds.
    """
    share(what, None, timeout=timeout)
