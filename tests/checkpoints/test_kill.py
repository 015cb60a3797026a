"""Killed or interrupted at random moments, nothing looks whole that is not, and the next run succeeds."""

import random
import signal
import time
from pathlib import Path

import pytest
from fork_server import ForkServer
from load_workers import load_workers

from shardzoo import checkpoints
from shardzoo.checkpoints.staging import staging_path
from shardzoo.errors import InputError

workers = load_workers(Path(__file__).with_name("kill_workers.py"))
COUNTS = [26, pytest.param(60, marks=pytest.mark.slow)]  # of kills and interrupts


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


@pytest.mark.parametrize("count", COUNTS)
def test_writing_is_carried_on_after_any_number_of_kills(tmp_path, count):
    rng = random.Random(0)
    kills, rounds = 0, 0
    with ForkServer(workers.write) as server:
        took = finish(server, tmp_path / "whole")
        whole = bytes_of(tmp_path / "whole")
        while kills < count:
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


@pytest.mark.parametrize("count", COUNTS)
def test_a_save_that_is_killed_leaves_nothing_that_looks_whole(tmp_path, count):
    rng = random.Random(1)
    path = tmp_path / "ckpt"
    kills = {signal.SIGKILL: 0, signal.SIGINT: 0}
    with ForkServer(workers.save) as server:
        took = finish(server, path)
        path.rename(tmp_path / "whole")
        for turn in range(4 * count):
            number = signal.SIGKILL if turn % 2 else signal.SIGINT
            began = time.monotonic()
            status = interrupt(server, path, number, rng.uniform(0, took))
            kills[number] += status != 0
            if status == 0:  # the first run, with everything cold, may have taken longer than any other
                took = min(took, time.monotonic() - began)
            if check_not_half(path):
                path.rename(tmp_path / f"done{turn}")
            if min(kills.values()) >= count / 2:
                break
        finish(server, path)
    assert min(kills.values()) >= count / 2, kills
    assert bytes_of(path) == bytes_of(tmp_path / "whole")
    checkpoints.verify(path, "full")
