"""Qwen-Image transformers, as diffusers names them, which is how they are published; single files have a prefix.

Facts taken from the model file of diffusers, from published configs, and from what ComfyUI looks for in single files.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from shardzoo.convert.families import FamilyRules, Layout
from shardzoo.convert.rules import Rule
from shardzoo.convert.source import TensorInfo
from shardzoo.errors import InputError, fail_if
from shardzoo.zoo.qwen_image import Config

_HEADS = "(heads head_dim)"
_BLOCK = "{root}transformer_blocks.{layer}"
# of a stream: name of its own layers, projections of the attention, part of the names of its norms, output
_STREAMS = {
    "image": ("img", ("to_q", "to_k", "to_v"), "", "to_out.0"),
    "text": ("txt", ("add_q_proj", "add_k_proj", "add_v_proj"), "added_", "to_add_out"),
}


def _linear(target: str, source: str, dims: tuple[str, str], **place: Any) -> Iterator[Rule]:
    """Weight and bias."""
    for kind, one in zip(("weight", "bias"), dims, strict=True):
        yield Rule(target=f"{target}.{kind}", source=f"{source}.{kind}", dims=one, **place)


def _rules() -> Iterator[Rule]:
    yield from _linear("image", "{root}img_in", ("embed channels", "embed"))
    yield Rule(target="text.norm.weight", source="{root}txt_norm.weight", dims="channels")
    yield from _linear("text.linear", "{root}txt_in", ("embed channels", "embed"))
    time = "{root}time_text_embed.timestep_embedder"
    yield from _linear("conditions.time.up", f"{time}.linear_1", ("cond channels", "cond"))
    yield from _linear("conditions.time.down", f"{time}.linear_2", ("embed cond", "embed"))
    yield Rule(target="conditions.added", source=f"{{root}}{_ADDED}", dims="kinds embed")
    for stream, (name, projections, added, out) in _STREAMS.items():
        target = f"double.{stream}"
        yield from _linear(f"{target}.modulation", f"{_BLOCK}.{name}_mod.1", _MODULATION)
        for block, projection in enumerate(projections):
            yield from _linear(
                f"{target}.attn.qkv", f"{_BLOCK}.attn.{projection}", (f"{_HEADS} embed", _HEADS), at={"block": block}
            )
        for x in "qk":
            yield Rule(
                target=f"{target}.attn.{x}_norm.weight", source=f"{_BLOCK}.attn.norm_{added}{x}.weight", dims="head_dim"
            )
        yield from _linear(f"{target}.out", f"{_BLOCK}.attn.{out}", (f"embed {_HEADS}", "embed"))
        yield from _linear(f"{target}.up", f"{_BLOCK}.{name}_mlp.net.0.proj", ("mlp embed", "mlp"))
        yield from _linear(f"{target}.down", f"{_BLOCK}.{name}_mlp.net.2", ("embed mlp", "embed"))
    yield from _linear("head.modulation", "{root}norm_out.linear", _MODULATION)
    yield from _linear("head.out", "{root}proj_out", ("channels embed", "channels"))


_MODULATION = ("(block embed) cond", "(block embed)")
_ADDED = "time_text_embed.addition_t_embedding.weight"
_RULES, _SINGLE = tuple(_rules()), "model.diffusion_model."
LAYOUTS = (
    Layout(name="diffusers", roots={"root": ""}, stem="diffusion_pytorch_model"),
    Layout(name="single file", roots={"root": _SINGLE}, stem="qwen_image"),
)
ZERO_COND = "__index_timestep_zero__"  # an empty tensor in single files of models that have `zero_cond`
UNUSED = {rf"(.*\.)?{ZERO_COND}": "it says that reference images are of timestep 0, which is in the config"}
HEAD_DIM, AXES, PATCH = 128, (16, 56, 56), 2  # of the published models


def _from_tensors(tensors: Mapping[str, TensorInfo]) -> Config:
    """Sizes of a single file, from shapes, and its variant, from the tensors that only some have."""
    tensors = {key.removeprefix(_SINGLE): info for key, info in tensors.items()}
    places = {
        "image": "img_in.weight",
        "text": "txt_in.weight",
        "mlp": "transformer_blocks.0.img_mlp.net.0.proj.weight",
        "out": "proj_out.weight",
        "heads": "transformer_blocks.0.attn.norm_q.weight",
    }
    found = {name: tensors[key].shape if key in tensors else () for name, key in places.items()}
    bad = [name for name, shape in found.items() if len(shape) != (1 if name == "heads" else 2)]
    if found["heads"] not in ((), (HEAD_DIM,)):
        bad.append("heads")
    if bad:
        raise InputError(
            f"qwen-image: without a config.json the sizes come from the tensors: {', '.join(bad)} do not tell"
            f" (heads are {HEAD_DIM} wide in the published models): name a config.json by config= (--config)"
        )
    return Config(
        in_channels=found["image"][1],
        out_channels=found["out"][0],
        patch=PATCH,
        heads=found["image"][0] // HEAD_DIM,
        head_dim=HEAD_DIM,
        layers=len({m.group(1) for m in (re.match(r"transformer_blocks\.(\d+)\.", key) for key in tensors) if m}),
        mlp=found["mlp"][0],
        text=found["text"][1],
        zero_cond=ZERO_COND in tensors,
        layered=_ADDED in tensors,
        added_cond=_ADDED in tensors,
        axes=AXES,
    )


_FIELDS = {  # field of diffusers -> ours, and its default there
    "in_channels": ("in_channels", 64),
    "patch_size": ("patch", PATCH),
    "num_attention_heads": ("heads", 24),
    "attention_head_dim": ("head_dim", HEAD_DIM),
    "num_layers": ("layers", 60),
    "joint_attention_dim": ("text", 3584),
}
_FLAGS = {"zero_cond_t": "zero_cond", "use_layer3d_rope": "layered", "use_additional_t_cond": "added_cond"}
_RATIO = 4  # of the mlp's width to the stream's


def read_config(source: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Config:
    """The model that a config.json of diffusers describes, or, of single files without one, that the tensors tell.

    Raises:
        InputError: fields of another kind, and what these models do not do, by name.
    """
    if not source:
        return _from_tensors(tensors)
    given = {name: source.get(name, default) for name, (_, default) in _FIELDS.items()}
    given["out_channels"] = source.get("out_channels", 16) or given["in_channels"]
    flags = {name: source.get(name, False) for name in (*_FLAGS, "guidance_embeds")}
    axes = source.get("axes_dims_rope", AXES)
    problems = [
        f"{n}={v!r} is not a whole number of at least 1" for n, v in given.items() if type(v) is not int or v < 1
    ]
    problems += [f"{name}={value!r} is not true or false" for name, value in flags.items() if type(value) is not bool]
    if not isinstance(axes, list | tuple) or not all(type(n) is int and n > 0 for n in axes):
        problems.append(f"axes_dims_rope={axes!r} is not a list of whole numbers")
    if flags["guidance_embeds"] is True:
        problems.append("guidance_embeds=true is not supported: no published model has them")
    fail_if(problems, "config.json: not a QwenImageTransformer2DModel as this zoo runs it")
    sizes = {ours: given[field] for field, (ours, _) in _FIELDS.items()}
    return Config(
        **sizes,
        out_channels=given["patch_size"] ** 2 * given["out_channels"],
        mlp=_RATIO * given["num_attention_heads"] * given["attention_head_dim"],
        axes=tuple(axes),
        **{ours: flags[field] for field, ours in _FLAGS.items()},
    )


def write_config(config: Config, layout: str) -> dict[str, Any] | None:
    """config.json as diffusers has it; single files have none.

    Raises:
        InputError: a single file would not tell which variant it is.
    """
    if layout == LAYOUTS[1].name:
        lost = [f"zero_cond: nothing but a tensor {ZERO_COND!r} says it there"] if config.zero_cond else []
        fail_if(lost, "qwen-image: layout 'single file' does not hold all of this model: export as 'diffusers'")
        return None
    return {
        "_class_name": "QwenImageTransformer2DModel",
        **{field: getattr(config, ours) for field, (ours, _) in _FIELDS.items()},
        "out_channels": config.out_channels // config.patch**2,
        "guidance_embeds": False,
        "axes_dims_rope": list(config.axes),
        **{field: getattr(config, ours) for field, ours in _FLAGS.items()},
    }


FAMILY = FamilyRules(
    family="qwen-image",
    part="transformer",
    layouts=LAYOUTS,
    rules=_RULES,
    unused=UNUSED,
    read_config=read_config,
    config_optional=True,
    write_config=write_config,
)
