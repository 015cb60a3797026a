"""Restoring onto other meshes, with 1, 2, 4 and 8 processes of this machine: bytes read, and time against Orbax.

    python benchmarks/restore.py [--mib 256] [--processes 1 2 4 8] [--rounds 3] [--dir DIR]

For each of ten pairs of meshes (saved on one, restored on the other) and each number of processes:
 - bytes that each process reads, over the bytes of the distinct shards its devices hold;
 - wall time of our restore, over that of Orbax restoring the layout that Orbax itself writes, onto the same mesh in the
   same processes. The page cache is dropped before each, so both read from the disk; they alternate in every round.
 - CPU time likewise, which other work on the machine disturbs less.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PAIRS = [  # saved on, restored on
    ({"tensor": 8}, {"tensor": 8}),
    ({"tensor": 8}, {"data": 8}),
    ({"tensor": 4, "data": 2}, {"tensor": 2, "context": 4}),
    ({"tensor": 2, "context": 4}, {"tensor": 8}),
    ({"data": 8}, {"tensor": 4, "context": 2}),
    ({"tensor": 1}, {"tensor": 2, "data": 4}),
    ({"tensor": 8}, {"pipe": 4, "tensor": 2}),
    ({"pipe": 2, "tensor": 4}, {"tensor": 8}),
    ({"tensor": 4}, {"data": 2, "context": 2, "tensor": 2}),
    ({"context": 8}, {"pipe": 8}),
]
DEVICES = 8


def declare(mib: int):
    """A decoder-like model of about `mib` MiB in bfloat16, stacked blocks split over `pipe` as well."""
    import ml_dtypes
    import numpy as np

    from shardzoo.zoo.layout import Param, stack
    from shardzoo.zoo.mesh import TP

    bf16, embed, heads, head_dim, mlp, vocab = np.dtype(ml_dtypes.bfloat16), 1024, 16, 64, 4096, 32768
    block = {
        "q": Param("heads head_dim embed", (heads, head_dim, embed), {"heads": TP}, bf16),
        "k": Param("heads head_dim embed", (heads, head_dim, embed), {"heads": TP}, bf16),
        "v": Param("heads head_dim embed", (heads, head_dim, embed), {"heads": TP}, bf16),
        "out": Param("embed heads head_dim", (embed, heads, head_dim), {"heads": TP}, bf16),
        "up": Param("mlp embed", (mlp, embed), {"mlp": TP}, bf16),
        "down": Param("embed mlp", (embed, mlp), {"mlp": TP}, bf16),
        "norm": Param("embed", (embed,), {}, bf16),
        "bias": Param("heads head_dim", (heads, head_dim), {"heads": TP}, bf16),
    }
    table = Param("vocab embed", (vocab, embed), {"vocab": TP}, bf16)
    layers = max(8, round((mib - 64) / 24 / 8) * 8)
    return {"embed": table, "blocks": stack(block, layers, "pipe")}


def values(param, seed: int):
    """Random finite bfloat16 bits."""
    import numpy as np

    bits = np.random.default_rng(seed).integers(0, 1 << 16, param.shape, dtype=np.uint16)
    return (bits & 0xBFFF).view(param.dtype)


def model_on(declared, mesh):
    """A live model of random values, each process making its own shards."""
    import jax
    from jax.sharding import NamedSharding

    from shardzoo.zoo.layout import fill, named

    live = {}
    for seed, (path, param) in enumerate(named(declared).items()):
        whole = values(param, seed)
        sharding = NamedSharding(mesh, param.spec)
        live[path] = jax.make_array_from_callback(param.shape, sharding, lambda at, whole=whole: whole[at])
    return fill(declared, live)


def read_bytes() -> int:
    with open("/proc/self/io") as f:
        return int(f.readline().split()[1])


def save_all(folder: Path, saved_on: dict, mib: int, engines: list) -> None:
    from orbax.checkpoint import v1 as ocp

    from shardzoo import checkpoints
    from shardzoo.zoo.mesh import make_mesh

    declared = declare(mib)
    model = model_on(declared, make_mesh(**saved_on))
    header = checkpoints.ManifestHeader(family="benchmark", config={})
    checkpoints.save(folder / "ours", model, declared, header=header)
    if "orbax" in engines:
        ocp.save(folder / "orbax", model)


def restore_once(folder: Path, engine: str, degrees: dict, mib: int) -> dict:
    """One restore: seconds, of one CPU too, bytes read, bytes of the distinct shards held."""
    import jax
    from orbax.checkpoint import v1 as ocp

    from shardzoo import checkpoints
    from shardzoo.checkpoints import distributed
    from shardzoo.zoo.layout import abstract, named
    from shardzoo.zoo.mesh import make_mesh

    declared, mesh = declare(mib), make_mesh(**degrees)
    distributed.barrier("start", timeout=120)
    before, cpu, start = read_bytes(), time.process_time(), time.perf_counter()
    if engine == "ours":
        model = checkpoints.restore(folder / "ours", mesh, declared=declared)
    else:
        model = ocp.load(folder / "orbax", abstract(declared, mesh))
    jax.block_until_ready(jax.tree.leaves(model))
    cpu = time.process_time() - cpu
    distributed.barrier("end", timeout=600)
    took, read = time.perf_counter() - start, read_bytes() - before
    held = 0
    for leaf in named(model).values():
        held += sum({str(s.index): s.data.nbytes for s in leaf.addressable_shards}.values())
    return {"seconds": took, "cpu": cpu, "read": read, "held": held}


def worker(job: dict, calls: dict) -> None:
    """One process of `launch`."""
    from shardzoo.checkpoints import distributed

    if job["processes"] > 1:
        distributed.initialize(job["coordinator"], job["processes"], job["process"], timeout=120)
    print("RESULT " + json.dumps(calls[job["call"]](Path(job["folder"]), **job["arguments"])), flush=True)


def launch(script: str, call: str, folder: Path, arguments: dict, processes: int, devices: int = DEVICES) -> list[dict]:
    """Runs `call` of a script's workers in so many processes, which share the CPU devices; the result of each."""
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{s.getsockname()[1]}"
    job = {
        "call": call,
        "folder": str(folder),
        "arguments": arguments,
        "processes": processes,
        "coordinator": coordinator,
    }
    flags = f"--xla_force_host_platform_device_count={devices // processes}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "TF_CPP_MIN_LOG_LEVEL": "3"}
    running = [
        subprocess.Popen(
            [sys.executable, script, "--worker", json.dumps({**job, "process": p})],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for p in range(processes)
    ]  # fmt: skip
    outputs = [p.communicate(timeout=900) for p in running]
    for process, (_, err) in zip(running, outputs, strict=True):
        if process.returncode:
            raise SystemExit(f"a worker of {call} failed:\n{err[-3000:]}")
    return [json.loads(out.split("RESULT ", 1)[1]) for out, _ in outputs]


def drop_cache(folder: Path) -> None:
    """Takes the files below `folder` out of the page cache."""
    os.sync()
    for file in folder.rglob("*"):
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def measure(folder: Path, degrees: dict, processes: int, args: argparse.Namespace) -> dict:
    times: dict[str, list[float]] = {engine: [] for engine in args.engines}
    cpu: dict[str, list[float]] = {engine: [] for engine in args.engines}
    worst = dict.fromkeys(args.engines, 0.0)
    for turn in range(args.rounds):
        for engine in args.engines[:: 1 if turn % 2 == 0 else -1]:
            drop_cache(folder)
            wanted = {"engine": engine, "degrees": degrees, "mib": args.mib}
            results = launch(__file__, "restore", folder, wanted, processes)
            times[engine].append(max(r["seconds"] for r in results))
            cpu[engine].append(sum(r["cpu"] for r in results))
            worst[engine] = max(worst[engine], *(r["read"] / r["held"] for r in results))
    middle = {engine: statistics.median(times[engine]) for engine in times}
    busy = {engine: statistics.median(cpu[engine]) for engine in cpu}
    return {"worst": worst, "seconds": middle, "cpu": busy}


def columns(m: dict) -> list[str]:
    """The measured values of one row, and ours over Orbax's where both ran."""
    shown = [f"{v:15.3f}" for part in (m["worst"], m["seconds"], m["cpu"]) for v in part.values()]
    t = m["seconds"]
    return [*shown, f"{t['ours'] / t['orbax']:15.2f}"] if len(t) == 2 else shown


def name(degrees: dict) -> str:
    return ",".join(f"{k}={v}" for k, v in degrees.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--pairs", type=int, nargs="+", default=range(len(PAIRS)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="+", default=["ours", "orbax"], choices=["ours", "orbax"])
    parser.add_argument("--dir", type=Path, default=None, help="where to write; a folder on the disk to measure")
    parser.add_argument("--worker")
    args = parser.parse_args()
    if args.worker:
        worker(json.loads(args.worker), {"save": save_all, "restore": restore_once})
        return
    root = Path(tempfile.mkdtemp(prefix="restore-benchmark-", dir=args.dir))
    heads = [f"{what} {e}" for what in ("read/held", "seconds", "CPU s") for e in args.engines]
    print(
        f"{'saved on':>20} {'restored on':>28} processes",
        *(f"{h:>15}" for h in heads),
        "seconds ratio" if len(args.engines) == 2 else "",
    )
    try:
        for pair in args.pairs:
            saved_on, degrees = PAIRS[pair]
            folder = root / f"pair{pair}"
            folder.mkdir()
            launch(__file__, "save", folder, {"saved_on": saved_on, "mib": args.mib, "engines": args.engines}, 1)
            for processes in args.processes:
                m = measure(folder, degrees, processes, args)
                print(f"{name(saved_on):>20} {name(degrees):>28} {processes:9}", *columns(m), flush=True)
            shutil.rmtree(folder)
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
