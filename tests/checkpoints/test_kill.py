"""Killed or interrupted at random moments, nothing looks whole that is not, and the next run succeeds."""

import importlib.util
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from fork_server import ForkServer

from shardzoo import checkpoints
from shardzoo.checkpoints.staging import staging_path
from shardzoo.errors import InputError

spec = importlib.util.spec_from_file_location("kill_workers", Path(__file__).parent / "kill_workers.py")
workers = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = workers
spec.loader.exec_module(workers)


def bytes_of(root):
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def finish(server, path):
    """Seconds that an undisturbed run takes."""
    child = server.start({"path": str(path)})
    start = time.monotonic()
    assert child.wait() == 0, server.errors()
    return time.monotonic() - start


def interrupt(server, path, number, moment):
    """Runs once and sends the signal after `moment` seconds; returns the exit status, -number if it died of it."""
    child = server.start({"path": str(path)})
    time.sleep(moment)
    child.kill(number)
    return child.wait()


def check_not_half(path):
    """There is a whole checkpoint at `path`, or none; returns whether there is one."""
    if path.exists():
        checkpoints.verify(path, "quick")
        assert not staging_path(path).exists()
        return True
    with pytest.raises(InputError):
        checkpoints.open(path)
    if staging_path(path).exists():
        with pytest.raises(InputError):
            checkpoints.open(staging_path(path))
    return False


def test_writing_is_carried_on_after_any_number_of_kills(tmp_path):
    rng = random.Random(0)
    kills, rounds = 0, 0
    with ForkServer(workers.write) as server:
        took = finish(server, tmp_path / "whole")
        whole = bytes_of(tmp_path / "whole")
        while kills < 60:
            path = tmp_path / f"round{rounds}"
            rounds += 1
            for _ in range(12):
                number = rng.choice((signal.SIGKILL, signal.SIGINT))
                status = interrupt(server, path, number, rng.uniform(0, took / 3))
                kills += status != 0
                if check_not_half(path):
                    break
            else:
                finish(server, path)
            assert bytes_of(path) == whole
    assert rounds >= 3


def test_a_save_that_is_killed_leaves_nothing_that_looks_whole(tmp_path):
    rng = random.Random(1)
    path = tmp_path / "ckpt"
    kills = {signal.SIGKILL: 0, signal.SIGINT: 0}
    with ForkServer(workers.save) as server:
        took = finish(server, path)
        path.rename(tmp_path / "whole")
        for turn in range(80):
            number = signal.SIGKILL if turn % 2 else signal.SIGINT
            status = interrupt(server, path, number, rng.uniform(0, took))
            kills[number] += status != 0
            if check_not_half(path):
                path.rename(tmp_path / f"done{turn}")
            if min(kills.values()) >= 26:
                break
        finish(server, path)
    assert min(kills.values()) >= 20
    assert bytes_of(path) == bytes_of(tmp_path / "whole")
    checkpoints.verify(path, "full")
