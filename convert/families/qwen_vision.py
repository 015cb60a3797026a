"""The vision tower of Qwen2.5-VL, as transformers names it: in the whole model, or alone.

Facts taken from the model and configuration files of transformers 5. The language tower is the decoder family's.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from shardzoo.convert.families import FamilyRules, Layout
from shardzoo.convert.families.fields import malformed
from shardzoo.convert.rules import Rule
from shardzoo.convert.source import TensorInfo
from shardzoo.errors import InputError, fail_if
from shardzoo.zoo.qwen2_5_vl import Config

_BLOCK = "{body}blocks.{layer}."
_HEADS = "(block heads head_dim)"


def _pair(target: str, source: str, weight: str, at: Mapping[str, int] | None = None) -> Iterator[Rule]:
    bias = weight[: weight.rindex(" ")]
    for kind, dims in (("weight", weight), ("bias", bias)):
        yield Rule(target=f"{target}.{kind}", source=f"{source}.{kind}", dims=dims, at=at or {})


RULES = (
    Rule(target="patches", source="{body}patch_embed.proj.weight", dims="embed channels frames height width"),
    Rule(target="blocks.attn_norm.weight", source=f"{_BLOCK}norm1.weight", dims="embed"),
    Rule(target="blocks.mlp_norm.weight", source=f"{_BLOCK}norm2.weight", dims="embed"),
    *_pair("blocks.attn.qkv", f"{_BLOCK}attn.qkv", f"{_HEADS} embed"),
    Rule(target="blocks.attn.out.weight", source=f"{_BLOCK}attn.proj.weight", dims="embed (heads head_dim)"),
    Rule(target="blocks.attn.out.bias", source=f"{_BLOCK}attn.proj.bias", dims="embed"),
    *_pair("blocks.mlp.gate_up", f"{_BLOCK}mlp.gate_proj", "mlp embed", {"block": 0}),
    *_pair("blocks.mlp.gate_up", f"{_BLOCK}mlp.up_proj", "mlp embed", {"block": 1}),
    *_pair("blocks.mlp.down", f"{_BLOCK}mlp.down_proj", "embed mlp"),
    Rule(target="merger.norm.weight", source="{body}merger.ln_q.weight", dims="embed"),
    *_pair("merger.up", "{body}merger.mlp.0", "mlp channels"),
    *_pair("merger.down", "{body}merger.mlp.2", "embed mlp"),
)
_LANGUAGE = "language_model"
LAYOUTS = (
    Layout(name="transformers", roots={"body": "visual."}, other={"model.": _LANGUAGE, "lm_head.": _LANGUAGE}),
    Layout(
        name="transformers, multimodal",
        roots={"body": "model.visual."},
        other={"model.language_model.": _LANGUAGE, "lm_head.": _LANGUAGE},
    ),
    Layout(name="transformers, vision tower alone", roots={"body": ""}),
)
UNUSED = {r".*rotary_pos_emb\.inv_freq": "rotary tables follow from the config"}

_FIELDS = {  # field of transformers -> ours, and its default there
    "hidden_size": ("embed", 3584),
    "intermediate_size": ("mlp", 3420),
    "depth": ("layers", 32),
    "num_heads": ("heads", 16),
    "in_channels": ("channels", 3),
    "temporal_patch_size": ("frames", 2),
    "patch_size": ("patch", 14),
    "spatial_merge_size": ("merge", 2),
    "window_size": ("window", 112),
    "out_hidden_size": ("out", 3584),
}
_OLD = {"in_chans": "in_channels"}  # names in published configs
_WHOLE = (7, 15, 23, 31)
_THETA = 1e4


def read_config(source: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Config:
    """The tower that a config.json of transformers describes: alone, or as the `vision_config` of a whole model.

    Raises:
        InputError: fields missing or of another kind, and what the tower does not do, by name.
    """
    vision = source if source.get("model_type") == "qwen2_5_vl_vision" else source.get("vision_config")
    if not isinstance(vision, Mapping):
        raise InputError("config.json: vision_config is missing, or no object: name another file by config= (--config)")
    given = {new: vision[old] for old, new in _OLD.items() if vision.get(old) is not None} | dict(vision)
    rope = given.get("rope_parameters") or {}
    problems = malformed(given, whole=_FIELDS)
    problems += malformed(rope, numbers=("rope_theta",)) if isinstance(rope, Mapping) else [f"rope_parameters={rope!r}"]
    whole = given.get("fullatt_block_indexes", _WHOLE)
    if not isinstance(whole, list | tuple) or not all(type(i) is int for i in whole):
        problems.append(f"fullatt_block_indexes={whole!r} is not a list of whole numbers")
    if given.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act={given['hidden_act']!r} is not supported: only 'silu' is")
    fail_if(problems, "config.json: not a Qwen2.5-VL vision tower as this zoo runs it")
    sizes: dict[str, Any] = {ours: given.get(field) or default for field, (ours, default) in _FIELDS.items()}
    theta = rope.get("rope_theta")
    return Config(**sizes, whole=tuple(whole), theta=float(_THETA if theta is None else theta))


FAMILY = FamilyRules(
    family="qwen2.5-vl-vision",
    part="visual",
    layouts=LAYOUTS,
    rules=RULES,
    unused=UNUSED,
    read_config=read_config,
)
