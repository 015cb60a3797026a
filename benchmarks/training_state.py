"""Saving and restoring the state of a training run against Orbax's defaults, and what saving costs the run.

   python benchmarks/training_state.py [--mib 384] [--processes 1 2] [--rounds 3] [--parts save step]

- save: seconds from the call until the step is there, and until the call returns, of ours and of Orbax's checkpointer
  with its defaults, of the same model and AdamW moments in the same processes, in turn;
- restore: seconds onto another mesh, split at rest and not, each in processes of its own, the page cache dropped before
  each, in turn; bytes read over the bytes of the distinct shards held;
- step: seconds of a training step without saving and with a save begun at every step.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from restore import drop_cache, launch, name, read_bytes, worker

SAVED_ON = ({"data": 2, "tensor": 4}, True)
RESTORED_ON = [({"data": 4, "tensor": 2}, True), ({"tensor": 8}, False), ({"data": 8}, True)]


def setup(mib: int, degrees: dict, fsdp: bool):
    """Declaration, optimizer and mesh of a run whose model and moments come to about `mib` MiB."""
    import optax

    from shardzoo.zoo.layout import Param, split_at_rest, stack
    from shardzoo.zoo.mesh import TP, Degrees, make_mesh

    layers, embed = 8, 512
    mlp = max(512, round(mib / 3 * 2**20 / 4 / (2 * layers * embed) / 64) * 64)
    block = {
        "up": Param("mlp embed", (mlp, embed), {"mlp": TP}),
        "down": Param("embed mlp", (embed, mlp), {"mlp": TP}),
        "norm": Param("embed", (embed,)),
    }
    declared = {"embed": Param("vocab embed", (2048, embed), {"vocab": TP}), "blocks": stack(block, layers, "pipe")}
    if fsdp:
        declared = split_at_rest(declared, "data", Degrees(**degrees))
    return declared, optax.adamw(1e-3), make_mesh(**degrees)


def first_state(declared, optimizer, mesh):
    """A state of random values, each process making its own shards."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from shardzoo import checkpoints
    from shardzoo.zoo import optimizer_state
    from shardzoo.zoo.layout import fill, named

    def place(declared, start):
        live = {}
        for seed, (path, p) in enumerate(named(declared).items(), start):
            whole = np.random.default_rng(seed).standard_normal(p.shape, np.float32).astype(p.dtype)
            live[path] = jax.make_array_from_callback(p.shape, p.sharding(mesh), lambda at, whole=whole: whole[at])
        return fill(declared, live)

    whole = NamedSharding(mesh, PartitionSpec())
    step, key = jax.jit(lambda: (np.int32(0), jax.random.key(0)), out_shardings=whole)()
    opt_state = place(optimizer_state.declare(optimizer, declared), 100)
    return checkpoints.TrainingState(model=place(declared, 0), opt_state=opt_state, step=step, key=key, data={"at": 0})


def run_of(folder: Path, declared, optimizer, mesh, **options):
    from shardzoo import checkpoints

    header = checkpoints.ManifestHeader(family="benchmark", config={})
    return checkpoints.Training(folder, declared, optimizer, mesh, header=header, **options)


def trees(state) -> dict:
    """The state as Orbax is given it: a plain tree."""
    return {"model": state.model, "opt_state": state.opt_state, "step": state.step}


def save(folder: Path, mib: int, rounds: int) -> dict:
    """Seconds of each save by each engine, (until the call returns, until the step is there)."""
    import jax
    from orbax.checkpoint import v1 as ocp

    from shardzoo.checkpoints import distributed

    declared, optimizer, mesh = setup(mib, *SAVED_ON)
    state = first_state(declared, optimizer, mesh)
    jax.block_until_ready(jax.tree.leaves(trees(state)))
    times: dict[str, list] = {"ours": [], "orbax": []}
    keep_one = ocp.training.preservation_policies.LatestN(1)
    with (
        run_of(folder / "ours", declared, optimizer, mesh, keep=1) as training,
        ocp.training.Checkpointer(folder / "orbax", preservation_policy=keep_one) as checkpointer,
    ):

        def ours(step):
            training.save(state, step=step)
            return training.wait

        def orbax(step):
            return checkpointer.save_async(step, trees(state)).result

        for turn in range(rounds + 1):  # the first of each is not counted
            for engine, begin in list({"ours": ours, "orbax": orbax}.items())[:: 1 if turn % 2 else -1]:
                distributed.barrier("begin", timeout=300)
                start = time.perf_counter()
                wait = begin(turn + 1)
                returned = time.perf_counter() - start
                wait()
                distributed.barrier("end", timeout=300)
                times[engine].append((returned, time.perf_counter() - start))
    return {engine: found[1:] for engine, found in times.items()}


def restore(folder: Path, mib: int, engine: str, degrees: dict, fsdp: bool) -> dict:
    """One restore of the last step: seconds, bytes read, bytes of the distinct shards held."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec
    from orbax.checkpoint import v1 as ocp

    from shardzoo.checkpoints import distributed
    from shardzoo.zoo import optimizer_state
    from shardzoo.zoo.layout import abstract

    declared, optimizer, mesh = setup(mib, degrees, fsdp)
    if engine == "ours":
        with run_of(folder / "ours", declared, optimizer, mesh) as training:
            distributed.barrier("begin", timeout=300)
            before, start = read_bytes(), time.perf_counter()
            found = trees(training.restore())
            jax.block_until_ready(jax.tree.leaves(found))
    else:
        whole = NamedSharding(mesh, PartitionSpec())
        target = {
            "model": abstract(declared, mesh),
            "opt_state": optimizer_state.abstract_state(optimizer, declared, mesh),
            "step": jax.ShapeDtypeStruct((), np.int32, sharding=whole),
        }
        with ocp.training.Checkpointer(folder / "orbax") as checkpointer:
            distributed.barrier("begin", timeout=300)
            before, start = read_bytes(), time.perf_counter()
            found = checkpointer.load(abstract_state=target)
            jax.block_until_ready(jax.tree.leaves(found))
    distributed.barrier("end", timeout=300)
    took, read = time.perf_counter() - start, read_bytes() - before
    shards = [{str(s.index): s.data.nbytes for s in leaf.addressable_shards} for leaf in jax.tree.leaves(found)]
    return {"seconds": took, "read": read, "held": sum(n for leaf in shards for n in leaf.values())}


def step(folder: Path, mib: int, rounds: int) -> dict:
    """Median seconds of a training step, without saving and with a save begun at each; how many were begun."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    declared, optimizer, mesh = setup(mib, {"data": 2}, True)
    state = first_state(declared, optimizer, mesh)
    tokens = np.random.default_rng(0).integers(0, 2048, (8, 128))

    def loss(model):
        x = model["embed"][tokens]
        x, _ = jax.lax.scan(lambda x, b: (x + jax.nn.gelu((x * b["norm"]) @ b["up"].T) @ b["down"].T, None), x,
                            model["blocks"])  # fmt: skip
        return jnp.mean(x**2)

    @jax.jit
    def train(model, opt_state):
        updates, opt_state = optimizer.update(jax.grad(loss)(model), opt_state, model)
        return optax.apply_updates(model, updates), opt_state

    model, opt_state = train(state.model, state.opt_state)
    times: dict[str, list[float]] = {"without": [], "with": []}
    with run_of(folder / "steps", declared, optimizer, mesh, keep=1) as training:
        for number in range(1, 4 * rounds + 1):
            saving = "with" if number % 2 else "without"
            training.wait()
            start = time.perf_counter()
            for i in range(4):
                model, opt_state = jax.block_until_ready(train(model, opt_state))
                if saving == "with":
                    now = type(state)(model=model, opt_state=opt_state, step=state.step, key=state.key, data=None)
                    training.save(now, step=4 * number + i)
            times[saving].append((time.perf_counter() - start) / 4)
    return {how: statistics.median(found) for how, found in times.items()}


def report_save(root: Path, processes: int, args: argparse.Namespace) -> None:
    results = launch(__file__, "save", root, {"mib": args.mib, "rounds": args.rounds}, processes)
    shown = {}
    for engine in ("ours", "orbax"):
        rounds = zip(*(r[engine] for r in results), strict=True)  # of each round, what each process measured
        slowest = [[max(times) for times in zip(*each, strict=True)] for each in rounds]
        shown[engine] = [statistics.median(column) for column in zip(*slowest, strict=True)]
    ours, orbax = shown["ours"], shown["orbax"]
    print(
        f"save    {processes} processes, {args.mib} MiB: ours {ours[1]:.2f} s (call {ours[0]:.3f} s),"
        f" Orbax {orbax[1]:.2f} s (call {orbax[0]:.3f} s), ratio {ours[1] / orbax[1]:.2f}",
        flush=True,
    )


def report_restore(root: Path, processes: int, args: argparse.Namespace) -> None:
    for degrees, fsdp in RESTORED_ON:
        times: dict[str, list[float]] = {"ours": [], "orbax": []}
        share = {}
        for turn in range(args.rounds):
            for engine in list(times)[:: 1 if turn % 2 else -1]:
                drop_cache(root)
                wanted = {"engine": engine, "degrees": degrees, "fsdp": fsdp, "mib": args.mib}
                results = launch(__file__, "restore", root, wanted, processes)
                times[engine].append(max(r["seconds"] for r in results))
                share[engine] = max(r["read"] / r["held"] for r in results)
        ours, orbax = (statistics.median(times[engine]) for engine in ("ours", "orbax"))
        print(
            f"restore {processes} processes, {name(SAVED_ON[0])} -> {name(degrees)}{' at rest' if fsdp else ''}: ours"
            f" {ours:.2f} s (read {share['ours']:.2f} of what it holds), Orbax {orbax:.2f} s ({share['orbax']:.2f}),"
            f" ratio {ours / orbax:.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=384, help="of model and moments together")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", default=["save", "restore", "step"])
    parser.add_argument("--dir", type=Path, default=None, help="where to write; a folder on the disk to measure")
    parser.add_argument("--worker")
    args = parser.parse_args()
    if args.worker:
        worker(json.loads(args.worker), {"save": save, "restore": restore, "step": step})
        return
    for processes in args.processes:
        root = Path(tempfile.mkdtemp(prefix="training-benchmark-", dir=args.dir))
        try:
            if "save" in args.parts or "restore" in args.parts:
                report_save(root, processes, args)
            if "restore" in args.parts:
                report_restore(root, processes, args)
            if "step" in args.parts and processes == 1:
                found = launch(__file__, "step", root, {"mib": args.mib, "rounds": args.rounds}, 1, devices=2)[0]
                ratio = found["with"] / found["without"]
                print(
                    f"step    {args.mib} MiB, saved at every step: {found['with']:.3f} s,"
                    f" without {found['without']:.3f} s, ratio {ratio:.2f}",
                    flush=True,
                )
        finally:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
