"""Starts a test's own Python function in several JAX processes on this machine, and collects what each returns.

    results = run(workers.save_and_restore, {"path": str(path)}, processes=2, devices=4)

The function lives in a plain module (`tests/distributed/checkpoint_workers.py` and its like) and takes the keyword
arguments, which are JSON; every process joins `jax.distributed` before it is called.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(function, arguments, *, processes=2, devices=4, timeout=60, only=None, joins=True):
    """Starts `function(**arguments)` in each process; returns the handles. `only` leaves the others unstarted.

    Args:
        devices: CPU devices of each process.
        timeout: seconds to wait for each other at the start.
        joins: whether they join `jax.distributed` before the call.
    """
    port, handles = free_port(), []
    for index in range(processes):
        if only is not None and index not in only:
            continue
        job = {
            "file": sys.modules[function.__module__].__file__,
            "function": function.__name__,
            "arguments": arguments,
            "join": [f"127.0.0.1:{port}", processes, index, timeout] if joins else None,
        }
        out = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the handle)
        env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "OMP_NUM_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        handle = subprocess.Popen(
            [sys.executable, str(HERE / "process_main.py"), json.dumps(job)], stdout=out, stderr=out, env=env
        )
        handle.log = out
        handles.append(handle)
    return handles


def finish(handles, *, timeout=180):
    """Waits for every process; returns (exit status, result or None, output) of each. Kills those that are too slow."""
    deadline = time.monotonic() + timeout
    outcomes = []
    for handle in handles:
        try:
            handle.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            handle.kill()
            handle.wait()
        handle.log.seek(0)
        text = handle.log.read()
        handle.log.close()
        results = [json.loads(line.removeprefix("RESULT ")) for line in text.splitlines() if line.startswith("RESULT ")]
        outcomes.append((handle.returncode, results[-1] if results else None, text))
    return outcomes


def run(function, arguments, *, processes=2, devices=4, timeout=180):
    """The result of `function(**arguments)` in each process.

    Raises:
        AssertionError: a process failed; with its output.
    """
    outcomes = finish(start(function, arguments, processes=processes, devices=devices), timeout=timeout)
    failed = [f"process {i} ended with {code}:\n{text[-4000:]}" for i, (code, _, text) in enumerate(outcomes) if code]
    assert not failed, "\n".join(failed)
    return [result for _, result, _ in outcomes]
