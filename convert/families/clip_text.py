"""Text encoders of CLIP, as transformers names them; alone, in a whole CLIP, or in a single file (ComfyUI).

Facts taken from the model files of transformers 5. Single files have the same names, at times behind a prefix, and no
config.json. The image half of a CLIP and the projections of both halves are parts that are not run.
"""

import re
from collections.abc import Mapping
from typing import Any, cast

from shardzoo.convert.families import FamilyRules, Layout
from shardzoo.convert.families.clip_vision import BLOCK_RULES, UNUSED, pair
from shardzoo.convert.families.fields import malformed
from shardzoo.convert.rules import Rule
from shardzoo.convert.source import TensorInfo
from shardzoo.errors import InputError, fail_if
from shardzoo.zoo.clip import ACTIVATIONS, Activation
from shardzoo.zoo.clip_text import PRESETS, Config

RULES = (
    Rule(target="embed.weight", source="{body}embeddings.token_embedding.weight", dims="vocab embed"),
    Rule(target="positions", source="{body}embeddings.position_embedding.weight", dims="seq embed"),
    *BLOCK_RULES,
    *pair("norm", "{body}final_layer_norm", "embed", "embed"),
)
_OTHER = {
    "vision_model.": "image_encoder",
    "visual_projection.": "image_encoder",
    "text_projection.": "projection",
    "logit_scale": "projection",
}
LAYOUTS = (
    Layout(name="transformers", roots={"body": "text_model."}, other=_OTHER),
    Layout(name="transformers, no prefix", roots={"body": ""}),
)
_LEGACY_END = 2  # what configs say of the end token where it is the highest id

_FIELDS = {  # field -> ours, and the default of transformers
    "vocab_size": ("vocab", 49408),
    "hidden_size": ("embed", 512),
    "intermediate_size": ("mlp", 2048),
    "num_hidden_layers": ("layers", 12),
    "num_attention_heads": ("heads", 8),
    "max_position_embeddings": ("positions", 77),
}


def read_config(source: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Config:
    """The text encoder that a config.json of transformers describes: alone, or as the `text_config` of a CLIP.

    No tensor tells heads, activation and the end token: without a config the sizes have to be those of a preset.

    Raises:
        InputError: fields missing or of another kind, and what the encoder does not do, by name; sizes of no preset.
    """
    if not source:
        return _from_tensors(tensors)
    text = source.get("text_config") if source.get("model_type") == "clip" else source
    if not isinstance(text, Mapping):
        raise InputError("config.json: text_config is missing, or no object: name another file by config= (--config)")
    problems = malformed(text, whole=_FIELDS, numbers=("layer_norm_eps",))
    activation = text.get("hidden_act") or "quick_gelu"
    if activation not in ACTIVATIONS:
        problems.append(f"hidden_act={activation!r} is not supported: only 'gelu' and 'quick_gelu' are")
    end = text.get("eos_token_id", 49407)
    if type(end) is not int:
        problems.append(f"eos_token_id={end!r} is not a whole number")
    fail_if(problems, "config.json: not a CLIP text encoder as this zoo runs it")
    given: dict[str, Any] = {ours: text.get(field) or default for field, (ours, default) in _FIELDS.items()}
    eps = text.get("layer_norm_eps")
    return Config(
        **given,
        activation=cast(Activation, activation),
        end_token=None if end == _LEGACY_END else end,
        norm_eps=1e-5 if eps is None else float(eps),
    )


def _from_tensors(tensors: Mapping[str, TensorInfo]) -> Config:
    """The preset of these sizes."""
    body = "text_model." if "text_model.embeddings.token_embedding.weight" in tensors else ""
    keys = [f"{body}{name}.weight" for name in ("embeddings.token_embedding", "embeddings.position_embedding")]
    keys.append(f"{body}encoder.layers.0.mlp.fc1.weight")
    table, positions, up = (tensors[key].shape if key in tensors else () for key in keys)
    if not len(table) == len(positions) == len(up) == 2:
        raise InputError(
            f"clip-text: without a config.json the sizes come from the tensors, and {', '.join(keys)} are not all there"
            " as matrices: name a config.json by config= (--config)"
        )
    layers = {
        m.group(1) for m in (re.match(rf"{re.escape(body)}encoder\.layers\.(\d+)\.", key) for key in tensors) if m
    }
    sizes = {"vocab": table[0], "embed": table[1], "positions": positions[0], "mlp": up[0], "layers": len(layers)}
    for preset in PRESETS.values():
        if sizes == {name: getattr(preset, name) for name in sizes}:
            return preset
    raise InputError(
        f"clip-text: {', '.join(f'{name}={size}' for name, size in sizes.items())} are the sizes of no preset"
        f" ({', '.join(PRESETS)}), and no tensor tells heads, activation and the end token: name a config.json of"
        " CLIPTextModel by config= (--config)"
    )


def write_config(config: Config, layout: str) -> dict[str, Any]:
    """config.json of transformers."""
    return {
        "architectures": ["CLIPTextModel"],
        "model_type": "clip_text_model",
        **{field: getattr(config, ours) for field, (ours, _) in _FIELDS.items()},
        "hidden_act": config.activation,
        "layer_norm_eps": config.norm_eps,
        "eos_token_id": _LEGACY_END if config.end_token is None else config.end_token,
    }


FAMILY = FamilyRules(
    family="clip-text",
    part="text_encoder",
    layouts=LAYOUTS,
    rules=RULES,
    unused=UNUSED,
    read_config=read_config,
    config_optional=True,
    write_config=write_config,
)
