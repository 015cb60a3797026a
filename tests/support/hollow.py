"""Folders of real-size checkpoints without weights: true headers and configs over files that are one long hole."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

Shapes = dict[str, tuple[int, ...]]


def decoder_keys(
    *,
    layers: int,
    embed: int,
    mlp: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    body: str = "model.",
    head: str | None = "lm_head.weight",
    qk_norm: bool = False,
    qkv_bias: bool = False,
) -> Shapes:
    """Keys and shapes of a dense decoder as transformers names them."""
    q, kv = heads * head_dim, kv_heads * head_dim
    keys: Shapes = {f"{body}embed_tokens.weight": (vocab, embed)}
    for i in range(layers):
        block = f"{body}layers.{i}."
        keys |= {
            f"{block}self_attn.q_proj.weight": (q, embed),
            f"{block}self_attn.k_proj.weight": (kv, embed),
            f"{block}self_attn.v_proj.weight": (kv, embed),
            f"{block}self_attn.o_proj.weight": (embed, q),
            f"{block}mlp.gate_proj.weight": (mlp, embed),
            f"{block}mlp.up_proj.weight": (mlp, embed),
            f"{block}mlp.down_proj.weight": (embed, mlp),
            f"{block}input_layernorm.weight": (embed,),
            f"{block}post_attention_layernorm.weight": (embed,),
        }
        if qk_norm:
            keys |= {f"{block}self_attn.{n}_norm.weight": (head_dim,) for n in "qk"}
        if qkv_bias:
            keys |= {f"{block}self_attn.{n}_proj.bias": (size,) for n, size in (("q", q), ("k", kv), ("v", kv))}
    keys[f"{body}norm.weight"] = (embed,)
    if head:
        keys[head] = (vocab, embed)
    return keys


def pixtral_keys(prefix: str = "") -> Shapes:
    """The vision tower and projector of Mistral-Small-3.2."""
    tower = f"{prefix}vision_tower."
    keys: Shapes = {f"{tower}patch_conv.weight": (1024, 3, 14, 14), f"{tower}ln_pre.weight": (1024,)}
    for i in range(24):
        block = f"{tower}transformer.layers.{i}."
        keys |= {f"{block}attention.{n}_proj.weight": (1024, 1024) for n in "qkvo"}
        keys |= {f"{block}feed_forward.{n}_proj.weight": (4096, 1024) for n in ("gate", "up")}
        keys |= {f"{block}feed_forward.down_proj.weight": (1024, 4096)}
        keys |= {f"{block}{n}_norm.weight": (1024,) for n in ("attention", "ffn")}
    projector = f"{prefix}multi_modal_projector."
    return keys | {
        f"{projector}norm.weight": (1024,),
        f"{projector}patch_merger.merging_layer.weight": (1024, 4096),
        f"{projector}linear_1.weight": (5120, 1024),
        f"{projector}linear_2.weight": (5120, 5120),
    }


def qwen_vision_keys(prefix: str = "") -> Shapes:
    """The vision part of Qwen2.5-VL-7B."""
    visual = f"{prefix}visual."
    keys: Shapes = {f"{visual}patch_embed.proj.weight": (1280, 3, 2, 14, 14), f"{visual}merger.ln_q.weight": (1280,)}
    for i in range(32):
        block = f"{visual}blocks.{i}."
        keys |= {f"{block}norm{n}.weight": (1280,) for n in (1, 2)}
        sizes = {"attn.qkv": (3840, 1280), "attn.proj": (1280, 1280), "mlp.down_proj": (1280, 3420)}
        sizes |= {"mlp.gate_proj": (3420, 1280), "mlp.up_proj": (3420, 1280)}
        for name, (out, size) in sizes.items():
            keys |= {f"{block}{name}.weight": (out, size), f"{block}{name}.bias": (out,)}
    for n, out in ((0, 5120), (2, 3584)):
        keys |= {f"{visual}merger.mlp.{n}.weight": (out, 5120), f"{visual}merger.mlp.{n}.bias": (out,)}
    return keys


def write_hollow(folder: Path, keys: Mapping[str, tuple[int, ...]], config: dict | None, dtype: str = "BF16") -> Path:
    """A folder with one safetensors file of these tensors, which takes no room on the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    item = {"BF16": 2, "F16": 2, "F32": 4, "I8": 1, "F8_E4M3": 1}[dtype]
    header = json.dumps(dict(_entries(keys, dtype, item))).encode()
    size = sum(math.prod(shape) * item for shape in keys.values())
    path = folder / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + size)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def _entries(keys: Mapping[str, tuple[int, ...]], dtype: str, item: int) -> Iterator[tuple[str, dict]]:
    at = 0
    for key, shape in keys.items():
        stop = at + math.prod(shape) * item
        yield key, {"dtype": dtype, "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
