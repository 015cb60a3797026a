"""Loading FLUX.1 onto tensor=4 with four processes: bytes that each reads, and the memory that each needs.

    python benchmarks/loading.py [--gib 4] [--degree 4] [--dir DIR]

The checkpoint is converted from a synthetic diffusers folder with the names, packing and widths of FLUX.1 dev and as
many blocks as fill `--gib`. Each process holds one CPU device, so the share that it holds lies in its own memory too:
`peak` is all that the process ever held, interpreter and JAX included; `base` is what it held before it restored.
"""

import argparse
import dataclasses
import json
import math
import shutil
import tempfile
import time
from pathlib import Path

from restore import drop_cache, launch, read_bytes, worker

from convert import write_shards

ALLOWED = 300  # MiB on top of 1.3 shares
DOUBLE, SINGLE = 1, 2  # blocks of each kind stand in about the published proportion


MIB, GIB = 1 << 20, 1 << 30


def flux_config(gib: float):
    """FLUX.1 dev with as many blocks as come to about `gib` GiB in bfloat16, or a little more."""
    from shardzoo.zoo import flux

    whole = flux.PRESETS["flux1-dev"]
    for n in range(1, 20):
        config = dataclasses.replace(whole, double_layers=DOUBLE * n, single_layers=SINGLE * n)
        if sum(2 * math.prod(p.shape) for p in declared_leaves(config).values()) >= gib * GIB:
            return config
    return whole


def declared_leaves(config) -> dict:
    import jax.numpy as jnp

    from shardzoo.zoo import flux
    from shardzoo.zoo.layout import named

    return named(flux.declare(config, jnp.bfloat16))


def make_source(folder: Path, config) -> None:
    """The model's diffusers folder."""
    from shardzoo.convert.families import flux as rules
    from shardzoo.convert.rules import expected

    layout = next(layout for layout in rules.LAYOUTS if layout.name == "diffusers")
    tensors = expected(layout.rules, declared_leaves(config), {})
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(rules.write_config(config, "diffusers")))
    write_shards(folder, {key: e.shape for key, e in tensors.items()}, "diffusion_pytorch_model")


def convert_source(folder: Path, gib: float) -> None:
    """The source and its checkpoint below `folder`."""
    from shardzoo.convert.convert import convert

    make_source(folder / "source", flux_config(gib))
    convert(folder / "source", folder / "ckpt")
    shutil.rmtree(folder / "source")


def resident(what: str) -> int:
    """VmRSS (now) or VmHWM (the most so far) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(what))


def restore_here(folder: Path, tensor: int) -> dict:
    """One process's restore: seconds, bytes read, bytes held, resident before and at most."""
    import jax

    from shardzoo import checkpoints
    from shardzoo.checkpoints import distributed
    from shardzoo.zoo.layout import named
    from shardzoo.zoo.mesh import make_mesh

    mesh = make_mesh(tensor=tensor)
    distributed.barrier("start", timeout=120)
    base, before, start = resident("VmRSS"), read_bytes(), time.perf_counter()
    model = checkpoints.restore(folder / "ckpt", mesh)
    jax.block_until_ready(jax.tree.leaves(model))
    seconds, read = time.perf_counter() - start, read_bytes() - before
    held = sum(s.data.nbytes for leaf in named(model).values() for s in leaf.addressable_shards)
    return {"seconds": seconds, "read": read, "held": held, "base": base, "peak": resident("VmHWM")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--degree", type=int, default=4, help="of tensor, and the number of processes")
    parser.add_argument("--dir", type=Path, default=None, help="where to write; a folder on the disk to measure")
    parser.add_argument("--worker")
    args = parser.parse_args()
    if args.worker:
        worker(json.loads(args.worker), {"convert": convert_source, "restore": restore_here})
        return
    with tempfile.TemporaryDirectory(prefix="loading-benchmark-", dir=args.dir) as scratch:
        folder, degree = Path(scratch), args.degree
        launch(__file__, "convert", folder, {"gib": args.gib}, 1)
        drop_cache(folder)
        results = launch(__file__, "restore", folder, {"tensor": degree}, degree, devices=degree)
    print("process   held MiB   read/held   base MiB   peak MiB   allowed MiB   seconds")
    for i, r in enumerate(results):
        allowed = 1.3 * r["held"] / MIB + ALLOWED
        sizes = f"{r['base'] / MIB:10.0f} {r['peak'] / MIB:10.0f} {allowed:13.0f}"
        print(f"{i:7} {r['held'] / MIB:10.0f} {r['read'] / r['held']:11.3f} {sizes} {r['seconds']:9.2f}")


if __name__ == "__main__":
    main()
