"""Ctrl-C at any moment: no traceback, nothing that looks whole and is not, and the next run ends well."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny_llama
from command_line import environment, invoke, start

# Python itself ends by the signal (which a shell shows as 130 too) where it struck in code made from a string.
INTERRUPTED = (130, -signal.SIGINT)


def interrupt_at_random(words: tuple, times: int, longest: float) -> list[int]:
    """Exit statuses of a command that is interrupted at random moments of its first `longest` seconds."""
    rng, statuses = np.random.default_rng(0), []
    for _ in range(times):
        process = start(*words)
        time.sleep(rng.uniform(0.3, longest))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
        assert "Traceback" not in err, err
        assert process.returncode in (0, *INTERRUPTED), (process.returncode, out, err)
        statuses.append(process.returncode)
    return statuses


def check(source: Path, folder: Path, times: int, longest: float) -> None:
    """Interrupts conversions and exports of `source` and looks at what they leave."""
    statuses = interrupt_at_random(("convert", source, folder / "ckpt", "--overwrite"), times, longest)
    assert set(statuses) & set(INTERRUPTED)
    if (folder / "ckpt").exists():
        assert invoke("verify", folder / "ckpt", source).status == 0
    assert invoke("convert", source, folder / "ckpt", "--overwrite").status == 0
    interrupt_at_random(("export", folder / "ckpt", folder / "out", "--overwrite"), times, longest)
    assert invoke("export", folder / "ckpt", folder / "out", "--overwrite").status == 0
    for path in source.iterdir():
        assert (folder / "out" / path.name).read_bytes() == path.read_bytes()
    assert invoke("verify", folder / "ckpt", source).status == 0


def test_interrupted_commands_leave_nothing_half_done(tmp_path):
    check(tiny_llama.write(tmp_path / "source"), tmp_path, times=4, longest=2.0)


@pytest.mark.slow
def test_fifty_interrupts_of_convert_and_of_export(smollm2_folder, tmp_path):
    check(smollm2_folder, tmp_path, times=50, longest=6.0)


def test_a_ctrl_c_that_strikes_in_a_finalizer_is_not_lost():
    code = """
import gc, signal, sys, time
import shardzoo.__main__ as command
import shardzoo.cli.app

def strike(phase, info):
    gc.callbacks.remove(strike)
    signal.raise_signal(signal.SIGINT)
    for _ in range(1000):  # Python raises between two steps of this loop, not after it
        pass

def work(**options):
    gc.callbacks.append(strike)
    gc.collect()
    for _ in range(300):
        time.sleep(0.1)

shardzoo.cli.app.app = work
command.main()
"""
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode in INTERRUPTED and done.stderr == "" and time.monotonic() - begin < 25


def test_an_interrupted_command_ends_without_taking_the_interpreter_down():
    """Threads of XLA that compile meanwhile would crash it: here an exit handler stands for that."""
    code = """
import atexit, os
import shardzoo.__main__ as command
import shardzoo.cli.app

def work(**options):
    print("said")
    raise SystemExit(130)

atexit.register(os._exit, 11)
shardzoo.cli.app.app = work
command.main()
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "said\n", "")
