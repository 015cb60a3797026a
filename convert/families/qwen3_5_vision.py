"""The vision tower of Qwen3.5, as transformers names it: in the whole model, or alone.

Facts taken from the model and configuration files of transformers 5.
"""

from collections.abc import Mapping
from typing import Any

from shardzoo.convert.families import FamilyRules, Layout
from shardzoo.convert.families.clip_vision import pair
from shardzoo.convert.families.fields import malformed
from shardzoo.convert.rules import Rule
from shardzoo.convert.source import TensorInfo
from shardzoo.errors import InputError, fail_if
from shardzoo.zoo.qwen3_5_vision import Config

_BLOCK = "{body}blocks.{layer}."

RULES = (
    Rule(target="patches", source="{body}patch_embed.proj.weight", dims="embed channels frames height width"),
    Rule(target="bias", source="{body}patch_embed.proj.bias", dims="embed"),
    Rule(target="positions", source="{body}pos_embed.weight", dims="positions embed"),
    *pair("blocks.attn_norm", f"{_BLOCK}norm1", "embed", "embed"),
    *pair("blocks.attn.qkv", f"{_BLOCK}attn.qkv", "(block heads head_dim) embed", "(block heads head_dim)"),
    *pair("blocks.attn.out", f"{_BLOCK}attn.proj", "embed (heads head_dim)", "embed"),
    *pair("blocks.mlp_norm", f"{_BLOCK}norm2", "embed", "embed"),
    *pair("blocks.mlp.up", f"{_BLOCK}mlp.linear_fc1", "mlp embed", "mlp"),
    *pair("blocks.mlp.down", f"{_BLOCK}mlp.linear_fc2", "embed mlp", "embed"),
    *pair("merger.norm", "{body}merger.norm", "embed", "embed"),
    *pair("merger.up", "{body}merger.linear_fc1", "mlp channels", "mlp"),
    *pair("merger.down", "{body}merger.linear_fc2", "embed mlp", "embed"),
)
_LANGUAGE = "language_model"
LAYOUTS = (
    Layout(
        name="transformers, multimodal",
        roots={"body": "model.visual."},
        other={"model.language_model.": _LANGUAGE, "lm_head.": _LANGUAGE, "mtp.": "mtp"},
    ),
    Layout(name="transformers, vision tower alone", roots={"body": ""}),
)
UNUSED = {r".*rotary_pos_emb\.inv_freq": "rotary tables follow from the config"}

_FIELDS = {  # field of transformers -> ours, and its default there
    "hidden_size": ("embed", 1152),
    "intermediate_size": ("mlp", 4304),
    "depth": ("layers", 27),
    "num_heads": ("heads", 16),
    "in_channels": ("channels", 3),
    "temporal_patch_size": ("frames", 2),
    "patch_size": ("patch", 16),
    "spatial_merge_size": ("merge", 2),
    "out_hidden_size": ("out", 3584),
    "num_position_embeddings": ("positions", 2304),
}
_KINDS = ("qwen3_5", "qwen3_5_vision")  # of a vision_config; early files say the first
_ACTIVATION, _THETA = "gelu_pytorch_tanh", 1e4


def read_config(source: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Config:
    """The tower that a config.json of transformers describes: alone, or as the `vision_config` of a whole model.

    Raises:
        InputError: fields missing or of another kind, and what the tower does not do, by name.
    """
    vision = source if source.get("model_type") == "qwen3_5_vision" else source.get("vision_config")
    if not isinstance(vision, Mapping):
        raise InputError("config.json: vision_config is missing, or no object: name another file by config= (--config)")
    rope = vision.get("rope_parameters") or {}
    problems = malformed(vision, whole=_FIELDS)
    problems += _rope_problems(rope) if isinstance(rope, Mapping) else [f"rope_parameters={rope!r} is not an object"]
    only: dict[str, tuple[Any, ...]] = {
        "model_type": (None, *_KINDS),
        "hidden_act": (None, _ACTIVATION),
        "deepstack_visual_indexes": (None, []),  # features of blocks inside, as Qwen3-VL has them
    }
    problems += [
        f"{name}={vision[name]!r} is not supported: only {values[-1]!r} is"
        for name, values in only.items()
        if vision.get(name) not in values
    ]
    fail_if(problems, "config.json: not a Qwen3.5 vision tower as this zoo runs it")
    sizes: dict[str, Any] = {ours: vision.get(field) or default for field, (ours, default) in _FIELDS.items()}
    return Config(**sizes, theta=float(_THETA if rope.get("rope_theta") is None else rope["rope_theta"]))


def _rope_problems(rope: Mapping[str, Any]) -> list[str]:
    kind = rope.get("rope_type", "axial")
    known = kind in ("axial", "default")  # transformers takes the one for the other
    other = [] if known else [f"rope type {kind!r} is not supported: only 'axial' is"]
    return malformed(rope, numbers=("rope_theta",)) + other


FAMILY = FamilyRules(
    family="qwen3-5-vision",
    part="visual",
    layouts=LAYOUTS,
    rules=RULES,
    unused=UNUSED,
    read_config=read_config,
)
