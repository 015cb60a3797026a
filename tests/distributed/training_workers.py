"""What each process runs in the tests of training runs over several processes."""

import dataclasses
import json
import os
import time

import jax
import numpy as np
import optax
import toy_training as toy
from fork_server import ready

import shardzoo.checkpoints.training  # noqa: F401 (imports Orbax, once for all that are forked)
from shardzoo.checkpoints import distributed
from shardzoo.zoo.layout import named

LIGHT = toy.ToyTrainingConfig(layers=2, embed=16, mlp=32)


def go(folder, degrees, fsdp, steps):
    """Goes on from the last step there is and saves at the end; returns where it began, the losses, the examples."""
    run = toy.Run(degrees, fsdp)
    with run.training(folder, keep=None) as training:
        state = training.restore() or run.first()
        at = int(np.asarray(state.step.addressable_data(0)))
        state, losses, examples = run.go(state, steps)
        training.save(state)
    return {"at": at, "losses": losses, "examples": examples}


def read_share(folder, degrees, fsdp):
    """Bytes that this process reads against those of the distinct shards that it holds."""

    def read_total():
        with open("/proc/self/io") as f:
            return int(f.readline().split()[1])

    run = toy.Run(degrees, fsdp, config=toy.ToyTrainingConfig(embed=1024, mlp=2048, vocab=2048, layers=2))
    with run.training(folder, keep=None) as training:
        if training.restore() is None:
            training.save(run.first())
        training.wait()
        training.restore()  # what starting up reads is not counted
        before = read_total()
        state = training.restore()
        after = read_total()
    shards = [
        {str(s.index): s.data.nbytes for s in leaf.addressable_shards}
        for leaf in named((state.model, state.opt_state)).values()
    ]
    return {"read": after - before, "held": sum(n for leaf in shards for n in leaf.values())}


def live(folder, degrees, fsdp, steps, log, process, processes, port, devices, pause=0.0, cache=None):
    """One life of a run that is killed: joins the others, goes on from the last step, saves at every step.

    The first process notes where it began, each step that it has seen finished, and the last loss.
    """
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    ready()
    if cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if processes > 1:
        distributed.initialize(f"127.0.0.1:{port}", processes, process, timeout=60, shutdown_timeout=4)
    run = toy.Run(degrees, fsdp, config=LIGHT, optimizer=optax.sgd(0.05, momentum=0.9))

    def note(**what):
        if process == 0:
            with open(log, "a") as f:
                f.write(json.dumps(what) + "\n")

    with run.training(folder, keep=2, timeout=20) as training:
        state = training.restore() or run.first()
        at = int(np.asarray(state.step.addressable_data(0)))
        note(began=at, position=state.data["examples"])
        for step in range(at + 1, steps + 1):
            state, loss, _ = run.step(state)
            training.save(state, step=step, metrics={"loss": loss})
            note(seen=max(training.steps, default=0), loss=loss, step=step)
            if training.stopping:
                note(stopped=step)
                return
            time.sleep(pause)
    note(done=steps)


def dies(folder, degrees, process, timeout, how):
    """One process dies or hangs in the middle of a run; what the others end with, and how long after."""
    run = toy.Run(degrees)
    state, begin, training = run.first(), time.monotonic(), None
    try:
        with run.training(folder, timeout=timeout) as training:
            for turn in range(10):
                gone = turn == 3 and jax.process_index() == process
                if gone and how == "dies":
                    training.wait()
                    os.kill(os.getpid(), 9)
                begin = time.monotonic() if turn <= 3 else begin
                state, _, _ = run.go(state, 1)
                if gone:
                    time.sleep(4 * timeout)
                training.save(state)
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic() - begin, training.steps]
    return None


def one_cannot_write(folder, degrees, process):
    """The message on each process where one of them cannot write, and the steps after another save."""
    from shardzoo.checkpoints.store import LeafWriter

    run = toy.Run(degrees, True)
    state = run.first()
    write = LeafWriter.write

    def full(*_):
        raise OSError(28, os.strerror(28))

    message = None
    with run.training(folder) as training:
        if jax.process_index() == process:
            LeafWriter.write = full
        training.save(state)
        try:
            training.wait()
        except ValueError as error:
            message = str(error)
        LeafWriter.write = write
        training.save(dataclasses.replace(state, data={"examples": 8}))
    return message
