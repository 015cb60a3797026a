"""Runs a test's function in freshly forked processes, quickly: the imports are done once, in a server that forks.

    with ForkServer(workers.write) as server:
        child = server.start({"path": ...})      # returns when the child has called `ready()`
        child.kill(signal.SIGKILL)
        status = child.wait()                    # as in os.waitpid: exit status, or minus the signal

The function's module may import JAX, but nothing may start its backends before the fork.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import traceback


def ready() -> None:
    """Called by the function where the part to be interrupted begins."""
    print("READY", flush=True)


class Child:
    """A forked process that is running the function."""

    def __init__(self, server: "ForkServer", pid: int):
        self._server, self.pid = server, pid

    def kill(self, number: int) -> None:
        """Sends a signal, unless the child has ended already."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self) -> int:
        return int(self._server.read("DONE"))


class ForkServer:
    """A process with the function's imports done, from which each `start` forks a child; one at a time."""

    def __init__(self, function):
        module = sys.modules[function.__module__].__file__
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the server)
        self._process = subprocess.Popen(
            [sys.executable, __file__, module, function.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=env,
        )

    def start(self, arguments) -> Child:
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        pid = int(self.read("PID"))
        self.read("READY")
        return Child(self, pid)

    def read(self, word: str) -> str:
        """The rest of the next line that starts with `word`."""
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        raise EOFError(f"the server ended before it said {word}")

    def errors(self) -> str:
        """The last that its children have written to stderr."""
        self._errors.seek(0)
        return self._errors.read()[-3000:]

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *_) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._errors.close()


def _serve(path: str, name: str) -> None:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    spec = importlib.util.spec_from_file_location("workers_of_test", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    for line in sys.stdin:
        told, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.read(told, 1)  # until its number is printed, which comes before its own lines
            os._exit(_run(getattr(module, name), json.loads(line)))
        print("PID", pid, flush=True)
        os.write(tell, b".")
        os.close(told)
        os.close(tell)
        print("DONE", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _run(function, arguments) -> int:
    try:
        function(**arguments)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    _serve(*sys.argv[1:])
