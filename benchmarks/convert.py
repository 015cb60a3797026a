"""Speed and memory of `convert` (and `export`), against cp and against loading all and saving with Orbax.

    python benchmarks/convert.py --gib 4            # time and memory, sharded safetensors
    python benchmarks/convert.py --gib 4 --pth      # the same from one .pth file
    python benchmarks/convert.py --gib 8 --only convert

Runs in memory-backed storage, where a disk does not hide the work; needs about three times `--gib` there. Every side is
a process of its own; the sides take turns within each round, and ratios are of medians over the rounds.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HIDDEN, MLP, VOCAB, HEADS, KV_HEADS = 2048, 5632, 32000, 16, 4
SHARD = 1 << 30
COMMAND = [sys.executable, "-m", "shardzoo"]


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Keys and shapes of a Llama of this many layers, in the order in which transformers writes them."""
    kv = HIDDEN // HEADS * KV_HEADS
    made: dict[str, tuple[int, ...]] = {"lm_head.weight": (VOCAB, HIDDEN), "model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for i in range(layers):
        block = f"model.layers.{i}."
        made |= {
            f"{block}input_layernorm.weight": (HIDDEN,),
            f"{block}mlp.down_proj.weight": (HIDDEN, MLP),
            f"{block}mlp.gate_proj.weight": (MLP, HIDDEN),
            f"{block}mlp.up_proj.weight": (MLP, HIDDEN),
            f"{block}post_attention_layernorm.weight": (HIDDEN,),
            f"{block}self_attn.k_proj.weight": (kv, HIDDEN),
            f"{block}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{block}self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{block}self_attn.v_proj.weight": (kv, HIDDEN),
        }
    return made | {"model.norm.weight": (HIDDEN,)}


def nbytes(shape: tuple[int, ...]) -> int:
    return 2 * int(np.prod(shape))


def make_source(folder: Path, gib: float) -> None:
    """A sharded bfloat16 checkpoint of about `gib` GiB."""
    layer = sum(nbytes(s) for key, s in shapes(1).items() if ".layers." in key)
    rest = sum(nbytes(s) for key, s in shapes(0).items())
    layers = max(1, round((gib * (1 << 30) - rest) / layer))
    folder.mkdir(parents=True)
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "vocab_size": VOCAB,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 2048,
    }
    (folder / "config.json").write_text(json.dumps(config))
    # Values as weights have them: half of the bits are noise, the rest compress, which the Orbax side pays for.
    write_shards(folder, shapes(layers), "model")


def write_shards(folder: Path, tensors: dict[str, tuple[int, ...]], stem: str) -> None:
    """Tensors of bfloat16 noise in safetensors files of at most 1 GiB, with their index."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for key, shape in tensors.items():
        if sum(map(nbytes, shards[-1].values())) + nbytes(shape) > SHARD:
            shards.append({})
        shards[-1][key] = shape
    largest = max(int(np.prod(shape)) for shape in tensors.values())
    normal = np.random.default_rng(0).standard_normal(largest + (1 << 20), np.float32)
    noise = normal.view(np.uint16)[1::2].copy()
    weight_map = {}
    for i, shard in enumerate(shards):
        name = f"{stem}-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        write_shard(folder / name, shard, noise)
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": sum(map(nbytes, tensors.values()))}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))


def write_shard(path: Path, shard: dict[str, tuple[int, ...]], noise: np.ndarray) -> None:
    header, at = {}, 0
    for key, shape in shard.items():
        header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + nbytes(shape)]}
        at += nbytes(shape)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for i, shape in enumerate(shard.values()):
            count = int(np.prod(shape))
            start = (i * 7919) % (noise.size - count)
            file.write(memoryview(noise[start : start + count]))


def make_pth(source: Path, folder: Path) -> None:
    """The same tensors in one file as torch.save writes it."""
    program = (
        "import sys, glob, torch, safetensors.torch as s\n"
        "state = {}\n"
        "for f in sorted(glob.glob(sys.argv[1] + '/*.safetensors')): state.update(s.load_file(f))\n"
        "torch.save(state, sys.argv[2])"
    )
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    subprocess.run([sys.executable, "-c", program, str(source), str(folder / "model.pth")], check=True)


NAIVE = """
import sys, glob, jax, ml_dtypes, numpy as np
import orbax.checkpoint as ocp
if glob.glob(sys.argv[1] + "/*.pth"):
    import torch
    state = torch.load(glob.glob(sys.argv[1] + "/*.pth")[0], weights_only=True)
    state = {k: v.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) for k, v in state.items()}
else:
    from safetensors.numpy import load_file
    state = {}
    for f in sorted(glob.glob(sys.argv[1] + "/*.safetensors")): state.update(load_file(f))
state = {k: jax.numpy.asarray(v) for k, v in state.items()}
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(sys.argv[2], state)
"""


def measure(command: list[str], made: Path) -> tuple[float, float, float]:
    """Runs a command and removes what it made: seconds, seconds of CPU, MiB of peak resident memory."""
    shutil.rmtree(made, ignore_errors=True)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    began = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    if status:
        raise SystemExit(f"{command[:3]} failed with status {status}")
    shutil.rmtree(made)
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def sides(source: Path, made: Path, only: list[str]) -> dict[str, list[str]]:
    commands = {
        "cp": ["cp", "-r", str(source), str(made)],
        "convert": [*COMMAND, "convert", str(source), str(made)],
        "naive": [sys.executable, "-c", NAIVE, str(source), str(made)],
    }
    return {name: command for name, command in commands.items() if not only or name in only}


def report(name: str, runs: list[tuple[float, float, float]], size: int, base: dict[str, float]) -> None:
    seconds, cpu, memory = (statistics.median(column) for column in zip(*runs, strict=True))
    ratios = ", ".join(f"{seconds / other:.2f} x {which}" for which, other in base.items())
    spread = " ".join(f"{run[0]:.2f}" for run in runs)
    rate = size / seconds / (1 << 30)
    print(
        f"{name:8} {seconds:7.2f} s ({spread})  {cpu:6.2f} CPU s  {rate:5.2f} GiB/s  {memory:6.0f} MiB peak  {ratios}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--where", default="/dev/shm")
    parser.add_argument("--pth", action="store_true", help="from one .pth file instead of sharded safetensors")
    parser.add_argument("--only", nargs="*", default=[], help="some of: cp convert naive")
    parser.add_argument("--export", action="store_true", help="measure export as well, of one more conversion")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.where, prefix="shardzoo-bench-") as scratch:
        source, made = Path(scratch, "source"), Path(scratch, "made")
        # In a process of its own: a child's peak memory includes what its parent held when it was started.
        maker = multiprocessing.get_context("spawn").Process(target=make_source, args=(source, options.gib))
        maker.start()
        maker.join()
        size = sum(file.stat().st_size for file in source.iterdir())
        if options.pth:
            make_pth(source, Path(scratch, "pth"))
            shutil.rmtree(source)
            source = Path(scratch, "pth")
        print(f"{size / (1 << 30):.2f} GiB, {options.rounds} rounds, {options.where}")
        commands = sides(source, made, options.only)
        runs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in commands}
        for _ in range(options.rounds):
            for name, command in commands.items():
                runs[name].append(measure(command, made))
        if options.export:
            ckpt = Path(scratch, "ckpt")
            subprocess.run([*COMMAND, "convert", str(source), str(ckpt)], check=True, stdout=subprocess.DEVNULL)
            command = [*COMMAND, "export", str(ckpt), str(made)]
            runs["export"] = [measure(command, made) for _ in range(options.rounds)]
        medians = {name: statistics.median(run[0] for run in runs[name]) for name in runs if name in ("cp", "naive")}
        for name in runs:
            report(name, runs[name], size, {which: other for which, other in medians.items() if which != name})


if __name__ == "__main__":
    main()
