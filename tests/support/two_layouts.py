"""A made-up family with two layouts that differ in names, packing and config, and its sources in both."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import equinox as eqx
import numpy as np
import safetensors.numpy

from shardzoo.convert.families import FamilyRules, Layout
from shardzoo.convert.rules import Rule
from shardzoo.errors import InputError
from shardzoo.zoo.families import Family, register
from shardzoo.zoo.layout import Param, stack
from shardzoo.zoo.mesh import TP


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 6
    mlp: int = 10
    gate: bool = False

    @property
    def embed(self) -> int:
        return self.heads * self.head_dim


class Block(eqx.Module):
    q: Any
    kv: Any
    up: Any
    bias: Any
    shift: Any
    gate: Any

    @classmethod
    def declare(cls, c: Config) -> "Block":
        return cls(
            q=Param("heads head_dim embed", (c.heads, c.head_dim, c.embed), {"heads": TP}),
            kv=Param("block kv_heads head_dim embed", (2, c.kv_heads, c.head_dim, c.embed), {"kv_heads": "kv"}),
            up=Param("mlp embed", (c.mlp, c.embed), {"mlp": TP}),
            bias=Param("mlp", (c.mlp,), {"mlp": TP}),
            shift=Param("part embed", (2, c.embed)),
            gate=Param("embed", (c.embed,)) if c.gate else None,
        )


class Pair(eqx.Module):
    blocks: Block
    out: Any
    config: Config = eqx.field(static=True)

    @classmethod
    def declare(cls, c: Config) -> "Pair":
        return cls(
            blocks=stack(Block.declare(c), c.layers),
            out=Param("channels embed rows", (3, c.embed, 2)),
            config=c,
        )


def _packed(target: str, dims: str, start: int, **at: int) -> Rule:
    return Rule(target=target, source="{root}{layer}.qkv.weight", dims=dims, start={0: start}, at=at)


APART = (
    Rule(target="blocks.q", source="layers.{layer}.to_q.weight", dims="(heads head_dim) embed"),
    Rule(target="blocks.kv", source="layers.{layer}.to_k.weight", dims="(kv_heads head_dim) embed", at={"block": 0}),
    Rule(target="blocks.kv", source="layers.{layer}.to_v.weight", dims="(kv_heads head_dim) embed", at={"block": 1}),
    Rule(target="blocks.up", source="layers.{layer}.up.weight", dims="mlp embed"),
    Rule(target="blocks.bias", source="layers.{layer}.up.bias", dims="mlp"),
    Rule(target="blocks.shift", source="layers.{layer}.table", dims="() part embed"),
    Rule(target="blocks.gate", source="layers.{layer}.gate", dims="embed"),
    Rule(target="out", source="proj_out.weight", dims="channels (embed rows)"),
)
# Rows of the sizes that `Config()` has: a packed layout says where each block begins.
PACKED = (
    _packed("blocks.q", "(heads head_dim) embed", 0),
    _packed("blocks.kv", "(kv_heads head_dim) embed", 24, block=0),
    _packed("blocks.kv", "(kv_heads head_dim) embed", 36, block=1),
    Rule(target="blocks.up", source="{root}{layer}.ffn.0.weight", dims="mlp embed"),
    Rule(target="blocks.bias", source="{root}{layer}.ffn.0.bias", dims="mlp"),
    Rule(target="blocks.shift", source="{root}{layer}.modulation", dims="() part () embed"),
    Rule(target="out", source="head.weight", dims="() channels embed rows"),
)


def read_config(source, tensors) -> Config:
    if source:
        return Config(layers=source.get("num_layers", source.get("depth")), gate=source.get("gate", False))
    layers = {key.split(".")[1] for key in tensors if key.startswith(("layers.", "blocks."))}
    if not layers:
        raise InputError("no layers to count: name the config by --config")
    return Config(layers=len(layers), gate=any(key.endswith("gate") for key in tensors))


def write_config(config: Config, layout: str) -> dict[str, Any] | None:
    if layout == "packed":
        return {"model_type": "pair", "depth": config.layers}
    return {"_class_name": "PairModel", "num_layers": config.layers, "gate": config.gate}


FAMILY = FamilyRules(
    family="pair",
    part="transformer",
    layouts=(
        Layout(name="apart", rules=APART, stem="diffusion_model"),
        Layout(name="packed", roots={"root": "blocks."}, rules=PACKED, unused={"seen": "a counter"}),
    ),
    read_config=read_config,
    config_optional=True,
    write_config=write_config,
)
register(Family("pair", Config, Pair.declare, {"small": Config()}))


def tensors_apart(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    q, kv, embed = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.embed
    shapes = {"proj_out.weight": (3, embed * 2)}
    for i in range(config.layers):
        shapes |= {f"layers.{i}.to_q.weight": (q, embed), f"layers.{i}.up.weight": (config.mlp, embed)}
        shapes |= {f"layers.{i}.to_{n}.weight": (kv, embed) for n in "kv"}
        shapes |= {f"layers.{i}.up.bias": (config.mlp,), f"layers.{i}.table": (1, 2, embed)}
        shapes |= {f"layers.{i}.gate": (embed,)} if config.gate else {}
    return {key: rng.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()}


def packed(tensors: dict[str, np.ndarray], config: Config) -> dict[str, np.ndarray]:
    """The same weights under the names and in the shapes of the other layout."""
    made = {"head.weight": tensors["proj_out.weight"].reshape(1, 3, config.embed, 2)}
    for i in range(config.layers):
        parts = [tensors[f"layers.{i}.to_{n}.weight"] for n in "qkv"]
        made[f"blocks.{i}.qkv.weight"] = np.concatenate(parts)
        made |= {f"blocks.{i}.ffn.0.{n}": tensors[f"layers.{i}.up.{n}"] for n in ("weight", "bias")}
        made[f"blocks.{i}.modulation"] = tensors[f"layers.{i}.table"].reshape(1, 2, 1, config.embed)
    return made


def write(folder: Path, tensors: dict[str, np.ndarray], config: dict | None) -> Path:
    folder.mkdir(parents=True)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder
