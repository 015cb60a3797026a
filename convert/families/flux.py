"""FLUX.1 image transformers, as diffusers and as the black-forest-labs repository name and pack them.

Facts taken from the model files of both and from published configs. The original packs q, k and v of a stream, and in
blocks of one stream the mlp's first layer with them and its second with the attention's output; it orders the head's
modulation shift, scale where diffusers has scale, shift.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from shardzoo.convert.families import FamilyRules, Layout
from shardzoo.convert.rules import Rule
from shardzoo.convert.source import TensorInfo
from shardzoo.errors import InputError, fail_if
from shardzoo.zoo.flux import Config

_HEADS = "(heads head_dim)"
_OUT = ("embed (heads head_dim)", "embed")
_UP, _DOWN = ("mlp embed", "mlp"), ("embed mlp", "embed")
_MODULATION = ("(block embed) cond", "(block embed)")
_VECTOR = {"up": ("cond channels", "cond"), "down": ("embed cond", "embed")}


def _linear(target: str, source: str, dims: tuple[str, str], **place: Any) -> Iterator[Rule]:
    """Weight and bias; `place` is `at` and `start`, which for both are along the rows."""
    for kind, one in zip(("weight", "bias"), dims, strict=True):
        yield Rule(target=f"{target}.{kind}", source=f"{source}.{kind}", dims=one, **place)


def _vector(target: str, source: str, first: str, second: str) -> Iterator[Rule]:
    yield from _linear(f"conditions.{target}.up", f"{source}.{first}", _VECTOR["up"])
    yield from _linear(f"conditions.{target}.down", f"{source}.{second}", _VECTOR["down"])


def _separate(target: str, source: str, names: tuple[str, str, str]) -> Iterator[Rule]:
    for block, name in enumerate(names):
        yield from _linear(
            f"{target}.attn.qkv", f"{source}.attn.{name}", (f"{_HEADS} embed", _HEADS), at={"block": block}
        )


def _packed(target: str, source: str) -> Iterator[Rule]:
    yield from _linear(f"{target}.attn.qkv", source, ("(block heads head_dim) embed", "(block heads head_dim)"))


def _norms(target: str, query: str, key: str) -> Iterator[Rule]:
    yield Rule(target=f"{target}.attn.q_norm.weight", source=query, dims="head_dim")
    yield Rule(target=f"{target}.attn.k_norm.weight", source=key, dims="head_dim")


def _diffusers() -> Iterator[Rule]:
    yield from _linear("image", "x_embedder", ("embed channels", "embed"))
    yield from _linear("text", "context_embedder", ("embed channels", "embed"))
    for target, source in (("time", "timestep"), ("guidance", "guidance"), ("pooled", "text")):
        yield from _vector(target, f"time_text_embed.{source}_embedder", "linear_1", "linear_2")
    block = "transformer_blocks.{layer}"
    for target, norm, names, added, out, ff in (
        ("double.image", "norm1", ("to_q", "to_k", "to_v"), "", "to_out.0", "ff"),
        (
            "double.text",
            "norm1_context",
            ("add_q_proj", "add_k_proj", "add_v_proj"),
            "added_",
            "to_add_out",
            "ff_context",
        ),
    ):
        yield from _linear(f"{target}.modulation", f"{block}.{norm}.linear", _MODULATION)
        yield from _separate(target, block, names)
        yield from _norms(target, *(f"{block}.attn.norm_{added}{x}.weight" for x in "qk"))
        yield from _linear(f"{target}.out", f"{block}.attn.{out}", _OUT)
        yield from _linear(f"{target}.up", f"{block}.{ff}.net.0.proj", _UP)
        yield from _linear(f"{target}.down", f"{block}.{ff}.net.2", _DOWN)
    block = "single_transformer_blocks.{layer}"
    yield from _linear("single.modulation", f"{block}.norm.linear", _MODULATION)
    yield from _separate("single", block, ("to_q", "to_k", "to_v"))
    yield from _norms("single", *(f"{block}.attn.norm_{x}.weight" for x in "qk"))
    yield from _linear("single.up", f"{block}.proj_mlp", _UP)
    yield from _beside(f"{block}.proj_out")
    yield from _linear("head.modulation", "norm_out.linear", _MODULATION)
    yield from _linear("head.out", "proj_out", ("channels embed", "channels"))


def _beside(source: str) -> Iterator[Rule]:
    """The layer whose columns are the attention's output, then the mlp's hidden numbers."""
    yield from _linear("single.out", source, _OUT)
    yield Rule(target="single.down.weight", source=f"{source}.weight", dims="embed mlp", start={1: "embed"})


def _original() -> Iterator[Rule]:
    yield from _linear("image", "img_in", ("embed channels", "embed"))
    yield from _linear("text", "txt_in", ("embed channels", "embed"))
    for target, source in (("time", "time_in"), ("guidance", "guidance_in"), ("pooled", "vector_in")):
        yield from _vector(target, source, "in_layer", "out_layer")
    for target, name in (("double.image", "img"), ("double.text", "txt")):
        block = f"double_blocks.{{layer}}.{name}"
        yield from _linear(f"{target}.modulation", f"{block}_mod.lin", _MODULATION)
        yield from _packed(target, f"{block}_attn.qkv")
        yield from _norms(target, *(f"{block}_attn.norm.{x}_norm.scale" for x in ("query", "key")))
        yield from _linear(f"{target}.out", f"{block}_attn.proj", _OUT)
        yield from _linear(f"{target}.up", f"{block}_mlp.0", _UP)
        yield from _linear(f"{target}.down", f"{block}_mlp.2", _DOWN)
    block = "single_blocks.{layer}"
    yield from _linear("single.modulation", f"{block}.modulation.lin", _MODULATION)
    yield from _packed("single", f"{block}.linear1")
    yield Rule(target="single.up.weight", source=f"{block}.linear1.weight", dims="mlp embed", start={0: "3 embed"})
    yield Rule(target="single.up.bias", source=f"{block}.linear1.bias", dims="mlp", start={0: "3 embed"})
    yield from _norms("single", *(f"{block}.norm.{x}_norm.scale" for x in ("query", "key")))
    yield from _beside(f"{block}.linear2")
    for row, start in ((0, {0: "embed"}), (1, {0: 0})):
        yield from _linear(
            "head.modulation", "final_layer.adaLN_modulation.1", ("embed cond", "embed"), at={"block": row}, start=start
        )
    yield from _linear("head.out", "final_layer.linear", ("channels embed", "channels"))


LAYOUTS = (
    Layout(name="diffusers", rules=tuple(_diffusers()), stem="diffusion_pytorch_model"),
    Layout(name="original", rules=tuple(_original()), stem="flux1"),
)
HEAD_DIM, AXES = 128, (16, 56, 56)  # of both published models


def _from_tensors(tensors: Mapping[str, TensorInfo]) -> Config:
    """Sizes of a source without config.json, which the original's files are, from shapes."""
    places = {
        "image": ("img_in.weight", "x_embedder.weight"),
        "text": ("txt_in.weight", "context_embedder.weight"),
        "pooled": ("vector_in.in_layer.weight", "time_text_embed.text_embedder.linear_1.weight"),
        "mlp": ("double_blocks.0.img_mlp.0.weight", "transformer_blocks.0.ff.net.0.proj.weight"),
        "out": ("final_layer.linear.weight", "proj_out.weight"),
        "norm": ("double_blocks.0.img_attn.norm.query_norm.scale", "transformer_blocks.0.attn.norm_q.weight"),
    }
    found = {name: next((tensors[k].shape for k in keys if k in tensors), ()) for name, keys in places.items()}
    missing = [name for name, shape in found.items() if len(shape) != (1 if name == "norm" else 2)]
    if missing or found["norm"] != (HEAD_DIM,):
        raise InputError(
            f"flux: without a config.json the sizes come from the tensors: {', '.join(missing) or 'heads'} do not tell"
            f" (heads are {HEAD_DIM} wide in the published models): name a config.json by config= (--config)"
        )
    blocks = {name: _count(tensors, pattern) for name, pattern in (("double", _DOUBLE), ("single", _SINGLE))}
    return Config(
        in_channels=found["image"][1],
        out_channels=found["out"][0],
        heads=found["image"][0] // HEAD_DIM,
        head_dim=HEAD_DIM,
        double_layers=blocks["double"],
        single_layers=blocks["single"],
        mlp=found["mlp"][0],
        text=found["text"][1],
        pooled=found["pooled"][1],
        guidance=any("guidance" in key for key in tensors),
        axes=AXES,
    )


_DOUBLE, _SINGLE = (
    r"(?:double_blocks|transformer_blocks)\.(\d+)\.",
    r"(?:single_blocks|single_transformer_blocks)\.(\d+)\.",
)


def _count(tensors: Mapping[str, TensorInfo], pattern: str) -> int:
    return len({m.group(1) for m in (re.match(pattern, key) for key in tensors) if m})


_FIELDS = {  # field of diffusers -> ours, and its default there
    "in_channels": ("in_channels", 64),
    "num_attention_heads": ("heads", 24),
    "attention_head_dim": ("head_dim", 128),
    "num_layers": ("double_layers", 19),
    "num_single_layers": ("single_layers", 38),
    "joint_attention_dim": ("text", 4096),
    "pooled_projection_dim": ("pooled", 768),
}
_RATIO = 4  # of the mlp's width to the stream's


def read_config(source: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Config:
    """The model that a config.json of diffusers describes, or, of original files, that the tensors tell.

    Raises:
        InputError: fields of another kind, and what these models do not do, by name.
    """
    if not source:
        return _from_tensors(tensors)
    given = {name: source.get(name, default) for name, (_, default) in _FIELDS.items()}
    given["out_channels"] = source.get("out_channels") or given["in_channels"]
    axes = source.get("axes_dims_rope", AXES)
    problems = [
        f"{n}={v!r} is not a whole number of at least 1" for n, v in given.items() if type(v) is not int or v < 1
    ]
    if not isinstance(axes, list | tuple) or not all(type(n) is int and n > 0 for n in axes):
        problems.append(f"axes_dims_rope={axes!r} is not a list of whole numbers")
    if source.get("patch_size", 1) != 1:
        problems.append(f"patch_size={source['patch_size']!r} is not supported: only 1 is")
    if type(source.get("guidance_embeds", False)) is not bool:
        problems.append(f"guidance_embeds={source['guidance_embeds']!r} is not true or false")
    fail_if(problems, "config.json: not a FluxTransformer2DModel as this zoo runs it")
    ours = {name: given[field] for field, (name, _) in _FIELDS.items()}
    return Config(
        **ours,
        out_channels=given["out_channels"],
        mlp=_RATIO * given["num_attention_heads"] * given["attention_head_dim"],
        guidance=source.get("guidance_embeds", False),
        axes=tuple(axes),
    )


def write_config(config: Config, layout: str) -> dict[str, Any] | None:
    """config.json as diffusers has it; the original has none."""
    if layout != "diffusers":
        return None
    return {
        "_class_name": "FluxTransformer2DModel",
        **{field: getattr(config, name) for field, (name, _) in _FIELDS.items()},
        "out_channels": config.out_channels,
        "patch_size": 1,
        "guidance_embeds": config.guidance,
        "axes_dims_rope": list(config.axes),
    }


FAMILY = FamilyRules(
    family="flux",
    part="transformer",
    layouts=LAYOUTS,
    read_config=read_config,
    config_optional=True,
    write_config=write_config,
)
