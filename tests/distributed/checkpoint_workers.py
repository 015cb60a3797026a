"""What each process runs in the tests of checkpoints over several processes."""

import errno
import os
import signal
import sys
import time

import jax
import numpy as np
import optax
import toy_checkpoints

from shardzoo import checkpoints
from shardzoo.checkpoints import distributed
from shardzoo.checkpoints.store import LeafWriter
from shardzoo.zoo.layout import named
from shardzoo.zoo.mesh import make_mesh


def read_total():
    """Bytes that this process has read by system calls."""
    with open("/proc/self/io") as f:
        return int(f.readline().split()[1])


def restore(path, degrees):
    """Restores; returns checksums, bytes read against those of the distinct shards held, and the largest host array."""
    ckpt = checkpoints.open(path)
    checkpoints.restore(ckpt, make_mesh(**degrees), include=["count"])  # what starting up reads is not counted
    module = sys.modules["shardzoo.checkpoints.restore"]
    begin, arrays = module._read, []

    def noted(source):
        reading = begin(source)
        arrays.append(reading.host.nbytes)
        return reading

    module._read = noted
    before = read_total()
    model = checkpoints.restore(ckpt, make_mesh(**degrees))
    after = read_total()
    shards = [{str(s.index): s.data.nbytes for s in leaf.addressable_shards} for leaf in named(model).values()]
    held = [n for leaf in shards for n in leaf.values()]
    return {
        "sums": checkpoints.checksum(model, timeout=60),
        "read": after - before,
        "held": sum(held),
        "largest_array": max(arrays),
        "largest_shard": max(held),
        "devices": jax.device_count(),
    }


def resave(path, to, degrees, **options):
    """Restores on one mesh and saves from it."""
    ckpt = checkpoints.open(path)
    model = checkpoints.restore(ckpt, make_mesh(**degrees))
    checkpoints.save(to, model, ckpt.declared, source=ckpt, timeout=60, **options)
    return checkpoints.verify(to).files


def save_errors(path, to, degrees):
    """The message that a refused save gives here."""
    ckpt = checkpoints.open(path)
    model = checkpoints.restore(ckpt, make_mesh(**degrees))
    try:
        checkpoints.save(to, model, ckpt.declared, timeout=60)
    except ValueError as error:
        return [type(error).__name__, str(error)]
    return None


def one_fails_to_save(path, to, degrees, process):
    """The message on each process where one of them cannot write."""
    if jax.process_index() == process:

        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        LeafWriter.write = full
    return save_errors(path, to, degrees)


def errors_apart(cases, degrees, folders):
    """The message that each restore gives here, and that of a run; what is given is a list with one for each process.

    Each is at once: nobody waits for a process that has failed.
    """
    me, mesh = jax.process_index(), make_mesh(**degrees)
    declared = toy_checkpoints.Toy.declare(toy_checkpoints.ToyConfig())
    restores = [
        lambda paths=paths, dtypes=dtypes: checkpoints.restore(paths[me], mesh, dtype=dtypes[me], timeout=30)
        for paths, dtypes in cases
    ]
    run = lambda: checkpoints.Training(folders[me], declared, optax.sgd(0.1), mesh, timeout=30)  # noqa: E731
    return [error_of(attempt) for attempt in (*restores, run)]


def error_of(attempt):
    try:
        attempt()
    except ValueError as error:
        return [type(error).__name__, str(error)]
    return None


def late(seconds, process, timeout):
    """One process comes late to a barrier; each returns the error it gets and how long it took."""
    distributed._RELAY = 2.0  # what the others wait longer for the first process, shorter here
    distributed.barrier("warm up", timeout=60)
    start = time.monotonic()
    if jax.process_index() == process:
        time.sleep(seconds)
    try:
        distributed.barrier("test", timeout=timeout)
    except distributed.ProcessTimeout as error:
        return [str(error), time.monotonic() - start]
    return None


def dies(path, to, degrees, process, timeout):
    """One process dies in the middle of a save."""
    ckpt = checkpoints.open(path)
    model = checkpoints.restore(ckpt, make_mesh(**degrees))
    if jax.process_index() == process:

        def die(*_):
            os.kill(os.getpid(), signal.SIGKILL)

        LeafWriter.finish = die
    start = time.monotonic()
    try:
        checkpoints.save(to, model, ckpt.declared, timeout=timeout)
    except distributed.ProcessTimeout as error:
        return [str(error), time.monotonic() - start, os.path.exists(to), os.path.exists(to + ".orbax-checkpoint-tmp")]
    return None


def exchange(count):
    """Values of every process, in order, several times over."""
    rounds = [distributed.share("x", [jax.process_index(), i], timeout=30) for i in range(count)]
    whole = np.arange(jax.device_count(), dtype=np.float32)
    mesh = make_mesh(tensor=jax.device_count())
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("kv", "rep")))
    spread = jax.make_array_from_callback(whole.shape, sharding, lambda i: whole[i])
    return {"rounds": rounds, "total": float(jax.jit(lambda x: x.sum())(spread))}
