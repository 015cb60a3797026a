"""Image encoders of CLIP, as transformers and the Wan2.1 repository name them; alone, or in a whole CLIP.

Facts taken from the model files of transformers 5 and of Wan2.1. The text half of a CLIP and the projections of both
halves are parts that are not run. The original's `to_qkv` is q, k and v row after row.
"""

import math
from collections.abc import Mapping
from typing import Any, cast

from shardzoo.convert.families import FamilyRules, Layout
from shardzoo.convert.families.fields import malformed
from shardzoo.convert.rules import Rule
from shardzoo.convert.source import TensorInfo
from shardzoo.errors import InputError, fail_if
from shardzoo.zoo.clip import Activation
from shardzoo.zoo.clip_vision import PRESETS, Config

_HEADS = "(heads head_dim)"


def pair(target: str, source: str, weight: str, bias: str, at: Mapping[str, int] | None = None) -> list[Rule]:
    """The rules of a layer's weight and bias, given the dims of both."""
    return [
        Rule(target=f"{target}.{kind}", source=f"{source}.{kind}", dims=dims, at=at or {})
        for kind, dims in (("weight", weight), ("bias", bias))
    ]


def _rules(
    first: tuple[str, str], positions: tuple[str, str], block: str, names: Mapping[str, str]
) -> tuple[Rule, ...]:
    """What the two layouts have in common: all but q, k and v. `names` are the layout's, by leaf."""
    return (
        Rule(target="patches.first", source=first[0], dims=first[1]),
        Rule(target="patches.positions", source=positions[0], dims=positions[1]),
        Rule(target="patches.weight", source=names["patches"], dims="embed channels height width"),
        *pair("patches.norm", names["patches.norm"], "embed", "embed"),
        *pair("norm", names["norm"], "embed", "embed"),
        *_block(block, names),
    )


def _block(block: str, names: Mapping[str, str]) -> list[Rule]:
    """The rules of a block but for q, k and v."""
    return [
        *pair("blocks.attn_norm", block + names["attn_norm"], "embed", "embed"),
        *pair("blocks.mlp_norm", block + names["mlp_norm"], "embed", "embed"),
        *pair("blocks.attn.out", block + names["out"], f"embed {_HEADS}", "embed"),
        *pair("blocks.mlp.up", block + names["up"], "mlp embed", "mlp"),
        *pair("blocks.mlp.down", block + names["down"], "embed mlp", "embed"),
    ]


_BLOCK = "{body}encoder.layers.{layer}."
_IN_BLOCK = {
    "attn_norm": "layer_norm1",
    "mlp_norm": "layer_norm2",
    "out": "self_attn.out_proj",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
_QKV = tuple(
    rule
    for i, name in enumerate("qkv")
    for rule in pair("blocks.attn.qkv", f"{_BLOCK}self_attn.{name}_proj", f"{_HEADS} embed", _HEADS, {"block": i})
)
BLOCK_RULES = (*_block(_BLOCK, _IN_BLOCK), *_QKV)  # of transformers, which names both encoders' blocks alike
RULES = (
    *_rules(
        ("{body}embeddings.class_embedding", "embed"),
        ("{body}embeddings.position_embedding.weight", "seq embed"),
        _BLOCK,
        {
            "patches": "{body}embeddings.patch_embedding.weight",
            "patches.norm": "{body}pre_layrnorm",
            "norm": "{body}post_layernorm",
            **_IN_BLOCK,
        },
    ),
    *_QKV,
)
_ORIGINAL_BLOCK = "visual.transformer.{layer}."
_ORIGINAL = (
    *_rules(
        ("visual.cls_embedding", "() () embed"),
        ("visual.pos_embedding", "() seq embed"),
        _ORIGINAL_BLOCK,
        {
            "patches": "visual.patch_embedding.weight",
            "patches.norm": "visual.pre_norm",
            "norm": "visual.post_norm",
            "attn_norm": "norm1",
            "mlp_norm": "norm2",
            "out": "attn.proj",
            "up": "mlp.0",
            "down": "mlp.2",
        },
    ),
    *pair("blocks.attn.qkv", f"{_ORIGINAL_BLOCK}attn.to_qkv", "(block heads head_dim) embed", "(block heads head_dim)"),
)
_OTHER = {
    "text_model.": "text_encoder",
    "text_projection.": "text_encoder",
    "visual_projection.": "projection",
    "logit_scale": "projection",
}
LAYOUTS = (
    Layout(name="transformers", roots={"body": "vision_model."}, other=_OTHER),
    Layout(name="transformers, no prefix", roots={"body": ""}),
    Layout(
        name="original",
        rules=_ORIGINAL,
        other={"textual.": "text_encoder", "visual.head": "projection", "log_scale": "projection"},
    ),
)
UNUSED = {r"(.*\.)?position_ids": "positions are computed"}

_FIELDS = {  # field -> ours, and the default of transformers
    "hidden_size": ("embed", 768),
    "intermediate_size": ("mlp", 3072),
    "num_hidden_layers": ("layers", 12),
    "num_attention_heads": ("heads", 12),
    "image_size": ("image", 224),
    "patch_size": ("patch", 32),
    "num_channels": ("channels", 3),
}


def read_config(source: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Config:
    """The image encoder that a config.json of transformers describes: alone, or as the `vision_config` of a CLIP.

    No tensor tells heads and activation: without a config the sizes have to be those of a preset.

    Raises:
        InputError: fields missing or of another kind, and what the encoder does not do, by name; sizes of no preset.
    """
    if not source:
        return _from_tensors(tensors)
    vision = source.get("vision_config") if source.get("model_type") == "clip" else source
    if not isinstance(vision, Mapping):
        raise InputError("config.json: vision_config is missing, or no object: name another file by config= (--config)")
    problems = malformed(vision, whole=_FIELDS, numbers=("layer_norm_eps",))
    activation = vision.get("hidden_act") or "quick_gelu"
    if activation not in ("gelu", "quick_gelu"):
        problems.append(f"hidden_act={activation!r} is not supported: only 'gelu' and 'quick_gelu' are")
    fail_if(problems, "config.json: not a CLIP image encoder as this zoo runs it")
    given: dict[str, Any] = {ours: vision.get(field) or default for field, (ours, default) in _FIELDS.items()}
    eps = vision.get("layer_norm_eps")
    return Config(**given, activation=cast(Activation, activation), norm_eps=1e-5 if eps is None else float(eps))


def _telling(layout: Layout) -> dict[str, str]:
    """The tensors that tell the sizes, as a layout names them: leaf to key."""
    rules = RULES if layout.rules is None else layout.rules
    keys = {rule.target: rule.source.format(layer=0, **layout.roots) for rule in rules}
    return {leaf: keys[leaf] for leaf in ("patches.weight", "patches.positions", "blocks.mlp.up.weight")}


def _from_tensors(tensors: Mapping[str, TensorInfo]) -> Config:
    """The preset of these sizes."""
    fitting = [keys for keys in map(_telling, LAYOUTS) if all(key in tensors for key in keys.values())]
    shapes = {leaf: tensors[key].shape for leaf, key in fitting[0].items()} if fitting else {}
    if len(shapes.get("patches.weight", ())) != 4:
        raise InputError(
            "clip-vision: without a config.json the sizes come from the tensors, and those of patches, positions and"
            " the first MLP are not all there: name a config.json by config= (--config)"
        )
    embed, channels, patch, _ = shapes["patches.weight"]
    start = fitting[0]["blocks.mlp.up.weight"].split("0.", 1)[0]
    sizes = {
        "embed": embed,
        "mlp": shapes["blocks.mlp.up.weight"][0],
        "layers": len({key[len(start) :].split(".")[0] for key in tensors if key.startswith(start)}),
        "image": math.isqrt(shapes["patches.positions"][-2] - 1) * patch,
        "patch": patch,
        "channels": channels,
    }
    for preset in PRESETS.values():
        if sizes == {name: getattr(preset, name) for name in sizes}:
            return preset
    raise InputError(
        f"clip-vision: {', '.join(f'{name}={size}' for name, size in sizes.items())} are the sizes of no preset"
        f" ({', '.join(PRESETS)}), and no tensor tells heads and activation: name a config.json of CLIPVisionModel by"
        " config= (--config)"
    )


def write_config(config: Config, layout: str) -> dict[str, Any] | None:
    """config.json of transformers; the Wan2.1 repository has none for its image encoder."""
    if layout == "original":
        return None
    return {
        "architectures": ["CLIPVisionModel"],
        "model_type": "clip_vision_model",
        **{field: getattr(config, ours) for field, (ours, _) in _FIELDS.items()},
        "hidden_act": config.activation,
        "layer_norm_eps": config.norm_eps,
    }


FAMILY = FamilyRules(
    family="clip-vision",
    part="image_encoder",
    layouts=LAYOUTS,
    rules=RULES,
    unused=UNUSED,
    read_config=read_config,
    config_optional=True,
    write_config=write_config,
)
