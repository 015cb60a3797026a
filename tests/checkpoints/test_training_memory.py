"""Memory of the process while training states are saved: flat over many saves, little more than one copy in each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"

MAIN = """
import ctypes, gc, json, os, sys, threading, time
sys.path.insert(0, os.environ["SUPPORT"])
import dataclasses
import jax
import toy_training as toy

config, saves, folder = json.loads(sys.argv[1])

def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def settled():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident()

run = toy.Run({"data": 2, "tensor": 2}, True, config=toy.ToyTrainingConfig(**config))
state = run.first()
jax.block_until_ready(jax.tree.leaves(state))
held = sum(s.data.nbytes for leaf in jax.tree.leaves((state.model, state.opt_state)) for s in leaf.addressable_shards)
peak, stop = [0], threading.Event()

def watch():
    while not stop.is_set():
        peak[0] = max(peak[0], resident())
        time.sleep(0.002)

sizes = []
with run.training(folder, keep=2) as training:
    for step in range(1, saves + 1):
        if step == 4:  # what starting up holds has come
            base = settled()
            threading.Thread(target=watch, daemon=True).start()
        training.save(state, step=step)
        training.wait()
        if step >= 4:
            sizes.append(settled())
stop.set()
print(json.dumps({"held": held, "base": base, "peak": peak[0], "sizes": sizes}))
"""


def measured(folder, saves, **config):
    env = {**os.environ, "SUPPORT": str(SUPPORT), "JAX_PLATFORMS": "cpu",
           "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}  # fmt: skip
    arguments = json.dumps([config, saves, str(folder)])
    ended = subprocess.run(
        [sys.executable, "-c", MAIN, arguments], env=env, capture_output=True, text=True, timeout=900
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


def test_a_save_takes_little_more_than_one_copy(tmp_path):
    found = measured(tmp_path, 6, layers=4, embed=1024, mlp=2048, vocab=4096)
    assert found["held"] > 200e6
    assert found["peak"] - found["base"] <= 1.2 * found["held"], found


@pytest.mark.slow
def test_many_saves_keep_memory_flat(tmp_path):
    found = measured(tmp_path, 104, layers=4, embed=256, mlp=1024, vocab=1024)
    first, last = max(found["sizes"][:5]), max(found["sizes"][-5:])
    assert last <= 1.05 * first, found["sizes"]
