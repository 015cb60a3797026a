"""A small model with every kind of leaf that a checkpoint meets, and checkpoints of it."""

import dataclasses
import math
from typing import Any

import equinox as eqx
import ml_dtypes
import numpy as np

from shardzoo import checkpoints
from shardzoo.zoo import families
from shardzoo.zoo.layout import Param, named, stack
from shardzoo.zoo.mesh import TP

BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyConfig:
    layers: int = 3
    embed: int = 64
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 16
    mlp: int = 96
    vocab: int = 56


class Block(eqx.Module):
    q: Any
    k: Any
    out: Any
    bias: Any
    up: Any
    scale: Any

    @classmethod
    def declare(cls, c: ToyConfig) -> "Block":
        return cls(
            q=Param("heads head_dim embed", (c.heads, c.head_dim, c.embed), {"heads": TP}, BF16),
            k=Param("kv_heads head_dim embed", (c.kv_heads, c.head_dim, c.embed), {"kv_heads": "kv"}, BF16),
            out=Param("embed heads head_dim", (c.embed, c.heads, c.head_dim), {"heads": TP}, BF16),
            bias=Param("heads head_dim", (c.heads, c.head_dim), {"heads": TP}, np.dtype("float32")),
            up=Param("mlp embed", (c.mlp, c.embed), {"mlp": TP}, np.dtype(ml_dtypes.float8_e4m3fn)),
            scale=Param("embed", (c.embed,), {}, np.dtype("float32")),
        )


class Toy(eqx.Module):
    embed: Any
    blocks: Block
    heads: list
    count: Any
    config: ToyConfig = eqx.field(static=True)

    @classmethod
    def declare(cls, c: ToyConfig) -> "Toy":
        return cls(
            embed=Param("vocab embed", (c.vocab, c.embed), {"vocab": TP}, BF16),
            blocks=stack(Block.declare(c), c.layers),
            heads=[Param("classes embed", (n, c.embed), {}, np.dtype("float16")) for n in (3, 5)],
            count=Param("", (), {}, np.dtype("int32")),
            config=c,
        )


families.register(families.Family("toy", ToyConfig, Toy.declare, {"small": ToyConfig()}))


def random_array(shape, dtype, seed):
    """Values of any dtype from random bits, without NaN (float bits are drawn from normal values)."""
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind in "iu":
        return rng.integers(-100, 100, shape).astype(dtype)
    return rng.standard_normal(shape).astype(np.float32).astype(dtype)


def values(declared, seed=0):
    """Path -> random numpy values of a declaration."""
    return {p: random_array(q.shape, q.dtype, seed + i) for i, (p, q) in enumerate(named(declared).items())}


def specs_of(declared):
    return {path: checkpoints.LeafSpec.of(param) for path, param in named(declared).items()}


def header(config=None, **more):
    config = config or ToyConfig()
    return checkpoints.ManifestHeader(family="toy", config=families.config_to_json(config), **more)


def write(dst, config=None, *, seed=0, carried=None, assets=None, plan="plan", **options):
    """A checkpoint of a toy model at `dst`; returns its values by path."""
    config = config or ToyConfig()
    declared = Toy.declare(config)
    stored = values(declared, seed) | {checkpoints.carried_path(k): v for k, v in (carried or {}).items()}
    aside = {k: plain_spec(v) for k, v in (carried or {}).items()}
    with checkpoints.CheckpointWriter(
        dst, header(config), specs_of(declared), plan, carried=aside, assets=assets, **options
    ) as writer:
        for path, value in stored.items():
            if path not in writer.done:
                put(writer, path, value)
        writer.publish()
    return stored


def put(writer, path, value):
    for block in writer.grid(path).blocks():
        writer.write(path, block, np.asarray(value[block]))
    writer.finish_leaf(path, [{"file": 0, "key": path, "dtype": str(value.dtype), "at": [[0, n] for n in value.shape]}])


def plain_spec(a):
    return checkpoints.LeafSpec(dims=tuple(f"d{i}" for i in range(a.ndim)), shape=a.shape, dtype=a.dtype)


def size(shape):
    return math.prod(shape)
