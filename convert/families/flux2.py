"""FLUX.2 image transformers, as diffusers and as the black-forest-labs repository name and pack them.

Facts taken from the model files of both and from published configs. Neither has biases. Both pack the two parts of an
mlp's first layer, and in blocks of one stream q, k, v with them and the mlp's second layer with the attention's output;
the original packs q, k and v of two-stream blocks too, and orders the head's modulation shift, scale where diffusers
has scale, shift.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from shardzoo.convert.families import FamilyRules, Layout
from shardzoo.convert.families.fields import too_large
from shardzoo.convert.rules import Rule
from shardzoo.convert.source import TensorInfo
from shardzoo.errors import InputError, fail_if
from shardzoo.strict_json import is_number
from shardzoo.zoo.flux2 import Config

_OUT = "embed (heads head_dim)"
_MODULATION = "(block embed) cond"
_QKV = "(block heads head_dim) embed"
_UP, _DOWN = "(block mlp) embed", "embed mlp"


def _rule(target: str, source: str, dims: str, **place: Any) -> Rule:
    """Of a weight; `place` is `at` and `start`."""
    return Rule(target=f"{target}.weight", source=f"{source}.weight", dims=dims, **place)


def _ends(names: Mapping[str, str], first: str, second: str) -> Iterator[Rule]:
    """What is not in the blocks, by our names -> theirs; `first` and `second` are the layers of the conditions."""
    yield _rule("image", names["image"], "embed channels")
    yield _rule("text", names["text"], "embed channels")
    for name in ("time", "guidance"):
        yield _rule(f"conditions.{name}.up", f"{names[name]}.{first}", "cond channels")
        yield _rule(f"conditions.{name}.down", f"{names[name]}.{second}", "embed cond")
    for name, source in (
        ("image", "double_stream_modulation_img"),
        ("text", "double_stream_modulation_txt"),
        ("single", "single_stream_modulation"),
    ):
        yield _rule(f"modulation.{name}", f"{source}.{names['modulation']}", _MODULATION)
    yield _rule("head.out", names["head"], "channels embed")


def _single(first: str, second: str, query: str, key: str) -> Iterator[Rule]:
    """Blocks of one stream: rows of `first` are q, k, v, gate, value; columns of `second` attention, mlp."""
    yield _rule("single.attn.qkv", first, _QKV)
    yield _rule("single.up", first, _UP, start={0: "3 embed"})
    yield from _norms("single", query, key)
    yield _rule("single.out", second, _OUT)
    yield _rule("single.down", second, _DOWN, start={1: "embed"})


def _norms(target: str, query: str, key: str) -> Iterator[Rule]:
    yield Rule(target=f"{target}.attn.q_norm.weight", source=query, dims="head_dim")
    yield Rule(target=f"{target}.attn.k_norm.weight", source=key, dims="head_dim")


def _diffusers() -> Iterator[Rule]:
    names = {"image": "x_embedder", "text": "context_embedder", "modulation": "linear", "head": "proj_out"}
    names |= {name: f"time_guidance_embed.{their}_embedder" for name, their in _EMBEDDERS.items()}
    yield from _ends(names, "linear_1", "linear_2")
    block = "transformer_blocks.{layer}"
    for target, qkv, added, out, ff in (
        ("double.image", ("to_q", "to_k", "to_v"), "", "to_out.0", "ff"),
        ("double.text", ("add_q_proj", "add_k_proj", "add_v_proj"), "added_", "to_add_out", "ff_context"),
    ):
        for row, name in enumerate(qkv):
            yield _rule(f"{target}.attn.qkv", f"{block}.attn.{name}", "(heads head_dim) embed", at={"block": row})
        yield from _norms(target, *(f"{block}.attn.norm_{added}{x}.weight" for x in "qk"))
        yield _rule(f"{target}.out", f"{block}.attn.{out}", _OUT)
        yield _rule(f"{target}.up", f"{block}.{ff}.linear_in", _UP)
        yield _rule(f"{target}.down", f"{block}.{ff}.linear_out", _DOWN)
    attn = "single_transformer_blocks.{layer}.attn"
    norms = (f"{attn}.norm_{x}.weight" for x in "qk")
    yield from _single(f"{attn}.to_qkv_mlp_proj", f"{attn}.to_out", *norms)
    yield _rule("head.modulation", "norm_out.linear", _MODULATION)


_EMBEDDERS = {"time": "timestep", "guidance": "guidance"}  # our names -> those of diffusers


def _original() -> Iterator[Rule]:
    names = {"image": "img_in", "text": "txt_in", "modulation": "lin", "head": "final_layer.linear"}
    yield from _ends({**names, "time": "time_in", "guidance": "guidance_in"}, "in_layer", "out_layer")
    for target, name in (("double.image", "img"), ("double.text", "txt")):
        block = f"double_blocks.{{layer}}.{name}"
        yield _rule(f"{target}.attn.qkv", f"{block}_attn.qkv", _QKV)
        yield from _norms(target, *(f"{block}_attn.norm.{x}_norm.scale" for x in ("query", "key")))
        yield _rule(f"{target}.out", f"{block}_attn.proj", _OUT)
        yield _rule(f"{target}.up", f"{block}_mlp.0", _UP)
        yield _rule(f"{target}.down", f"{block}_mlp.2", _DOWN)
    block = "single_blocks.{layer}"
    norms = (f"{block}.norm.{x}_norm.scale" for x in ("query", "key"))
    yield from _single(f"{block}.linear1", f"{block}.linear2", *norms)
    for row, start in ((0, {0: "embed"}), (1, {0: 0})):
        yield _rule("head.modulation", "final_layer.adaLN_modulation.1", "embed cond", at={"block": row}, start=start)


LAYOUTS = (
    Layout(name="diffusers", rules=tuple(_diffusers()), stem="diffusion_pytorch_model"),
    Layout(name="original", rules=tuple(_original()), stem="flux2"),
)
HEAD_DIM, AXES, THETA = 128, (32, 32, 32, 32), 2000  # of all published models
_PLACES = {  # what sizes are taken from: the original's tensor, that of diffusers
    "image": ("img_in.weight", "x_embedder.weight"),
    "text": ("txt_in.weight", "context_embedder.weight"),
    "freq": ("time_in.in_layer.weight", "time_guidance_embed.timestep_embedder.linear_1.weight"),
    "mlp": ("double_blocks.0.img_mlp.2.weight", "transformer_blocks.0.ff.linear_out.weight"),
    "out": ("final_layer.linear.weight", "proj_out.weight"),
    "norm": ("double_blocks.0.img_attn.norm.query_norm.scale", "transformer_blocks.0.attn.norm_q.weight"),
}
_DOUBLE = r"(?:double_blocks|transformer_blocks)\.(\d+)\."
_SINGLE = r"(?:single_blocks|single_transformer_blocks)\.(\d+)\."


def _from_tensors(tensors: Mapping[str, TensorInfo]) -> Config:
    """Sizes of a source without config.json, which the original's files are, from shapes."""
    found = {name: next((tensors[k].shape for k in keys if k in tensors), ()) for name, keys in _PLACES.items()}
    missing = [name for name, shape in found.items() if len(shape) != (1 if name == "norm" else 2)]
    if missing or found["norm"] != (HEAD_DIM,):
        raise InputError(
            f"flux2: without a config.json the sizes come from the tensors: {', '.join(missing) or 'heads'} do not tell"
            f" (heads are {HEAD_DIM} wide in the published models): name a config.json by config= (--config)"
        )
    return Config(
        in_channels=found["image"][1],
        out_channels=found["out"][0],
        heads=found["image"][0] // HEAD_DIM,
        head_dim=HEAD_DIM,
        double_layers=_count(tensors, _DOUBLE),
        single_layers=_count(tensors, _SINGLE),
        mlp=found["mlp"][1],
        text=found["text"][1],
        freq=found["freq"][1],
        guidance=any("guidance_in." in key or "guidance_embedder." in key for key in tensors),
        axes=AXES,
        theta=float(THETA),
    )


def _count(tensors: Mapping[str, TensorInfo], pattern: str) -> int:
    return len({m.group(1) for m in (re.match(pattern, key) for key in tensors) if m})


_FIELDS = {  # field of diffusers -> ours, and its default there
    "in_channels": ("in_channels", 128),
    "num_attention_heads": ("heads", 48),
    "attention_head_dim": ("head_dim", 128),
    "num_layers": ("double_layers", 8),
    "num_single_layers": ("single_layers", 48),
    "joint_attention_dim": ("text", 15360),
    "timestep_guidance_channels": ("freq", 256),
}
_NUMBERS = {"mlp_ratio": 3.0, "rope_theta": THETA, "eps": 1e-6}  # and their defaults


def read_config(source: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Config:
    """The model that a config.json of diffusers describes, or, of original files, that the tensors tell.

    Raises:
        InputError: fields of another kind, and what these models do not do, by name.
    """
    if not source:
        return _from_tensors(tensors)
    given = {name: source.get(name, default) for name, (_, default) in _FIELDS.items()}
    given["out_channels"] = source.get("out_channels") or given["in_channels"]
    numbers = {name: source.get(name, default) for name, default in _NUMBERS.items()}
    axes, guidance = source.get("axes_dims_rope", AXES), source.get("guidance_embeds", True)
    problems = [
        f"{n}={v!r} is not a whole number of at least 1" for n, v in given.items() if type(v) is not int or v < 1
    ]
    problems += too_large(given)
    problems += [f"{n}={v!r} is not a number above 0" for n, v in numbers.items() if not is_number(v) or not v > 0]
    problems += too_large({"mlp_ratio": numbers["mlp_ratio"]})
    if not isinstance(axes, list | tuple) or not all(type(n) is int and n > 0 for n in axes):
        problems.append(f"axes_dims_rope={axes!r} is not a list of whole numbers")
    if source.get("patch_size", 1) != 1:
        problems.append(f"patch_size={source['patch_size']!r} is not supported: only 1 is")
    if type(guidance) is not bool:
        problems.append(f"guidance_embeds={guidance!r} is not true or false")
    fail_if(problems, "config.json: not a Flux2Transformer2DModel as this zoo runs it")
    ours = {name: given[field] for field, (name, _) in _FIELDS.items()}
    return Config(
        **ours,
        out_channels=given["out_channels"],
        mlp=int(given["num_attention_heads"] * given["attention_head_dim"] * numbers["mlp_ratio"]),
        guidance=guidance,
        axes=tuple(axes),
        theta=float(numbers["rope_theta"]),
        eps=float(numbers["eps"]),
    )


def write_config(config: Config, layout: str) -> dict[str, Any] | None:
    """config.json as diffusers has it; the original has none."""
    if layout != "diffusers":
        return None
    return {
        "_class_name": "Flux2Transformer2DModel",
        **{field: getattr(config, name) for field, (name, _) in _FIELDS.items()},
        "out_channels": config.out_channels,
        "patch_size": 1,
        "mlp_ratio": _ratio(config),
        "axes_dims_rope": list(config.axes),
        "rope_theta": int(config.theta) if config.theta == int(config.theta) else config.theta,
        "eps": config.eps,
        "guidance_embeds": config.guidance,
    }


def _ratio(config: Config) -> float:
    """The mlp's width by the stream's, which diffusers multiplies and cuts down to a whole number again."""
    ratio = config.mlp / config.embed
    return ratio if int(config.embed * ratio) == config.mlp else (config.mlp + 0.5) / config.embed


FAMILY = FamilyRules(
    family="flux2",
    part="transformer",
    layouts=LAYOUTS,
    read_config=read_config,
    config_optional=True,
    write_config=write_config,
)
