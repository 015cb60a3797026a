"""Runs of several processes: going on with another number of them, killed at any moment, late, dead, told to stop."""

import collections
import contextlib
import itertools
import json
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import toy_training as toy
from fork_server import ForkServer
from load_workers import load_workers
from processes import finish, free_port, run, start

from shardzoo import checkpoints
from shardzoo.errors import InputError

workers = load_workers(Path(__file__).with_name("training_workers.py"))
CLOSE = 2e-5
STEPS = 6

# (processes, devices of each, degrees, FSDP)
LAYOUTS = [
    (1, 1, {}, False),
    (2, 1, {"data": 2}, True),
    (2, 4, {"data": 2, "pipe": 2, "tensor": 2}, True),
    (4, 2, {"context": 2, "tensor": 4}, False),
    (1, 8, {"data": 4, "tensor": 2}, True),
    (4, 1, {"data": 4}, True),
    (2, 2, {"pipe": 4}, False),
    (2, 4, {"data": 8}, True),
]
QUICK = [(LAYOUTS[1], LAYOUTS[0])]
RING = list(itertools.pairwise([*LAYOUTS, LAYOUTS[0]]))
SLOW = [pair for pair in [*RING, *((after, before) for before, after in RING)] if pair not in QUICK]


@pytest.fixture(scope="module")
def reference():
    one = toy.Run({})
    _, losses, _ = one.go(one.first(), 3 * STEPS)
    return losses


def go(folder, layout, steps):
    processes, devices, degrees, fsdp = layout
    return run(
        workers.go,
        {"folder": str(folder), "degrees": degrees, "fsdp": fsdp, "steps": steps},
        processes=processes,
        devices=devices,
    )


@pytest.mark.parametrize(
    ("before", "after"), [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)], ids=str
)
def test_a_run_goes_on_with_other_processes(tmp_path, reference, before, after):
    for result in go(tmp_path, before, 3):
        assert result["at"] == 0
        np.testing.assert_allclose(result["losses"], reference[:3], rtol=CLOSE)
    checkpoints.verify(tmp_path / "3")
    for result in go(tmp_path, after, STEPS):
        assert result["at"] == 3
        np.testing.assert_allclose(result["losses"], reference[3 : 3 + STEPS], rtol=CLOSE)
        assert result["examples"] == list(range(3 * toy.BATCH, (3 + STEPS) * toy.BATCH))


@pytest.mark.slow
def test_each_process_reads_what_its_devices_hold(tmp_path):
    arguments = {"folder": str(tmp_path), "degrees": {"data": 2, "tensor": 4}, "fsdp": True}
    run(workers.read_share, arguments)
    for degrees, fsdp in (({"data": 4, "tensor": 2}, True), ({"tensor": 8}, False), ({"data": 8}, True)):
        for result in run(workers.read_share, {**arguments, "degrees": degrees, "fsdp": fsdp}):
            assert result["held"] <= result["read"] <= 1.05 * result["held"] + 200_000, (degrees, result)


@pytest.mark.slow
def test_every_process_gets_the_error_of_one_and_the_next_save_succeeds(tmp_path):
    arguments = {"folder": str(tmp_path), "degrees": {"data": 2}, "process": 1}
    for message in run(workers.one_cannot_write, arguments, devices=1):
        assert "save step 0:" in message and "process 1: save: no space left" in message
        assert "process 0" not in message
    assert os.listdir(tmp_path) == ["0"]
    checkpoints.verify(tmp_path / "0")


@pytest.mark.parametrize(("process", "how"), [(1, "dies"), pytest.param(0, "dies", marks=pytest.mark.slow),
                                              pytest.param(1, "hangs", marks=pytest.mark.slow)])  # fmt: skip
def test_a_process_that_is_gone_ends_the_others_and_is_named(tmp_path, process, how):
    arguments = {"folder": str(tmp_path), "degrees": {"data": 2}, "process": process, "timeout": 5, "how": how}
    outcomes = finish(start(workers.dies, arguments, devices=1), timeout=120)
    status, result, text = outcomes[1 - process]
    if result is None:  # JAX itself ends a process whose coordinator, process 0, is gone
        named = "process 0" in text or "leader" in text.lower()
        assert process == 0 and status != 0 and named, text[-2000:]
        return
    kind, message, seconds, steps = result
    assert kind == "ProcessTimeout" and f"process {process} of 2" in message, message
    assert seconds < 40 and steps


class Pool:
    """Servers that fork the processes of one life of a run, one each."""

    def __init__(self, processes):
        self.servers = [ForkServer(workers.live) for _ in range(processes)]

    def start(self, layout, **arguments):
        processes, devices, degrees, fsdp = layout
        port = free_port()
        return [
            server.start(
                {"degrees": degrees, "fsdp": fsdp, "process": i, "processes": processes, "port": port,
                 "devices": devices, **arguments}
            )
            for i, server in enumerate(self.servers[:processes])
        ]  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for server in self.servers:
            server.__exit__()


@pytest.fixture(scope="module")
def pool():
    with Pool(2) as pool:
        yield pool


def notes(log):
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
    return []


def check_nothing_torn(folder):
    """Every step that is there is whole; returns the last."""
    steps = sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal()) if folder.exists() else []
    for step in steps:
        checkpoints.verify(folder / str(step), "full" if step == steps[-1] else "quick")
    for path in folder.iterdir() if folder.exists() else ():
        if not path.name.isdecimal():
            with pytest.raises(InputError):
                checkpoints.open(path)
    return steps[-1] if steps else 0


KILL_LAYOUTS = [
    (2, 1, {"data": 2}, True),
    (1, 2, {"pipe": 2}, False),
    (2, 2, {"data": 2, "tensor": 2}, True),
    (2, 1, {"tensor": 2}, False),
]


def run_to_its_end(pool, layout, **arguments):
    """Seconds that a life takes that nothing happens to."""
    begin = time.monotonic()
    children = pool.start(layout, **arguments)
    assert [c.wait() for c in children] == [0] * len(children), [s.errors() for s in pool.servers]
    return time.monotonic() - begin


def losses(log):
    """Step -> its losses, in every life that took it."""
    found = collections.defaultdict(list)
    for note in notes(log):
        if "loss" in note:
            found[note["step"]].append(note["loss"])
    return found


@pytest.mark.parametrize("kills", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_at_any_moment_a_run_loses_nothing(tmp_path, pool, kills):
    """SHARDZOO_KILLS and SHARDZOO_KILL_SEED make the slow case another one."""
    kills = int(os.environ.get("SHARDZOO_KILLS", kills)) if kills > 6 else kills
    rng = random.Random(int(os.environ.get("SHARDZOO_KILL_SEED", 0)))
    folder, log = tmp_path / "run", tmp_path / "log"
    steps, layouts = 20 * kills, KILL_LAYOUTS[: 2 if kills == 6 else None]
    shared = {"cache": str(tmp_path / "cache"), "pause": 0.05}
    killed = lives = alone = last = 0
    for i, layout in enumerate(layouts):  # compiles, so that lives are short
        run_to_its_end(pool, layout, folder=str(tmp_path / f"warm{i}"), log=str(tmp_path / "warm"), steps=1, **shared)
    again = {"folder": str(tmp_path / "warm0"), "log": str(tmp_path / "warm"), "steps": 4}
    took = run_to_its_end(pool, layouts[0], **again, **shared)
    while killed < kills:
        layout, count = rng.choice(layouts), len(notes(log))
        children = pool.start(layout, folder=str(folder), log=str(log), steps=steps, **shared)
        begin = time.monotonic()
        if rng.random() < 0.6:  # in the middle of its steps and saves, else anywhere from its start on
            while len(notes(log)) == count and time.monotonic() - begin < 60:
                time.sleep(0.05)
            time.sleep(rng.uniform(0, 1))
        else:
            time.sleep(rng.uniform(0, took))
        only = rng.randrange(len(children)) if rng.random() < 0.05 and len(children) > 1 else None
        for i, child in enumerate(children):
            if only in (None, i):
                child.kill(signal.SIGKILL)
        killed += -signal.SIGKILL in [child.wait() for child in children]
        assert only is None or time.monotonic() - begin < 2 * took + 60, "the others did not end in time"
        lives, alone = lives + 1, alone + (only is not None)
        for note in notes(log)[count:]:
            assert note.get("began", last) == last, "a life began elsewhere than at the last finished step"
            assert "began" not in note or note["position"] == last * toy.BATCH
        last = check_nothing_torn(folder)
        seen = max((note.get("seen", 0) for note in notes(log)), default=0)
        assert seen <= last < steps, f"step {seen} was finished, and the last that is there is {last}"
    end = {"steps": last + 5, **shared}
    run_to_its_end(pool, layouts[0], folder=str(folder), log=str(log), **end)
    run_to_its_end(pool, layouts[1], folder=str(tmp_path / "whole"), log=str(tmp_path / "undisturbed"), **end)
    reached, wanted = losses(log), losses(tmp_path / "undisturbed")
    print(f"{killed} kills in {lives} lives ({alone} of one process alone), {last + 5} steps")
    for step, values in reached.items():
        np.testing.assert_allclose(values, wanted[step] * len(values), rtol=1e-4, err_msg=f"step {step}")
    assert check_nothing_torn(folder) == max(reached) == last + 5


def test_sigterm_to_one_process_saves_and_ends_all(tmp_path, pool):
    folder, log = tmp_path / "run", tmp_path / "log"
    children = pool.start(KILL_LAYOUTS[0], folder=str(folder), log=str(log), steps=10_000, pause=0.05)
    deadline = time.monotonic() + 60
    while not losses(log) and time.monotonic() < deadline:
        time.sleep(0.2)
    begin = time.monotonic()
    children[1].kill(signal.SIGTERM)
    assert [c.wait() for c in children] == [0, 0], [s.errors() for s in pool.servers]
    assert time.monotonic() - begin < 20
    stopped = next(n["stopped"] for n in notes(log) if "stopped" in n)
    assert check_nothing_torn(folder) == stopped
