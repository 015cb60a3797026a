"""Wan2.1 and Wan2.2 diffusion transformers, as the Wan repositories and as diffusers name them.

Facts taken from the model files of both and from published configs. Neither layout packs, transposes or swaps anything:
they differ in names alone. The two numbers of norms are exchanged: the one that has weights is `norm3` in the original
and `norm2` in diffusers.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from shardzoo.convert.families import FamilyRules, Layout
from shardzoo.convert.rules import Rule
from shardzoo.convert.source import TensorInfo
from shardzoo.errors import InputError, fail_if
from shardzoo.zoo import wan
from shardzoo.zoo.wan import Config

_HEADS = "(heads head_dim)"
HEAD_DIM = 128  # of every published model; no tensor's shape tells it

# target, original name, name in diffusers, dims of the weight, dims of the bias
_Linear = tuple[str, str, str, str, str]


def _cross(target: str, block: int | None, original: str, diffusers: str) -> list[tuple[_Linear, int | None]]:
    names = (f"blocks.cross.{target}", f"cross_attn.{original}", f"attn2.{diffusers}")
    return [((*names, f"{_HEADS} embed", _HEADS), block)]


# Within a block: a linear layer, and the index in the leaf's `block` dim that it fills.
_BLOCK_LINEAR: tuple[tuple[_Linear, int | None], ...] = (
    *(
        (("blocks.attn.qkv", f"self_attn.{name}", f"attn1.to_{name}", f"{_HEADS} embed", _HEADS), i)
        for i, name in enumerate("qkv")
    ),
    (("blocks.attn.out", "self_attn.o", "attn1.to_out.0", f"embed {_HEADS}", "embed"), None),
    *_cross("q", None, "q", "to_q"),
    *_cross("text.kv", 0, "k", "to_k"),
    *_cross("text.kv", 1, "v", "to_v"),
    *_cross("image.kv", 0, "k_img", "add_k_proj"),
    *_cross("image.kv", 1, "v_img", "add_v_proj"),
    (("blocks.cross.out", "cross_attn.o", "attn2.to_out.0", f"embed {_HEADS}", "embed"), None),
    (("blocks.mlp.up", "ffn.0", "ffn.net.0.proj", "mlp embed", "mlp"), None),
    (("blocks.mlp.down", "ffn.2", "ffn.net.2", "embed mlp", "embed"), None),
)
_BLOCK_NORMS = (
    ("blocks.attn.q_norm", "self_attn.norm_q", "attn1.norm_q"),
    ("blocks.attn.k_norm", "self_attn.norm_k", "attn1.norm_k"),
    ("blocks.cross.q_norm", "cross_attn.norm_q", "attn2.norm_q"),
    ("blocks.cross.text.k_norm", "cross_attn.norm_k", "attn2.norm_k"),
    ("blocks.cross.image.k_norm", "cross_attn.norm_k_img", "attn2.norm_added_k"),
)
_EMBEDDER = "condition_embedder"
_LINEAR: tuple[_Linear, ...] = (
    ("patch", "patch_embedding", "patch_embedding", "embed channels frames height width", "embed"),
    ("text.up", "text_embedding.0", f"{_EMBEDDER}.text_embedder.linear_1", "cond channels", "cond"),
    ("text.down", "text_embedding.2", f"{_EMBEDDER}.text_embedder.linear_2", "embed cond", "embed"),
    ("time.features", "time_embedding.0", f"{_EMBEDDER}.time_embedder.linear_1", "cond channels", "cond"),
    ("time.out", "time_embedding.2", f"{_EMBEDDER}.time_embedder.linear_2", "embed cond", "embed"),
    ("time.project", "time_projection.1", f"{_EMBEDDER}.time_proj", "(block embed) cond", "(block embed)"),
    ("image.norm_in", "img_emb.proj.0", f"{_EMBEDDER}.image_embedder.norm1", "channels", "channels"),
    ("image.up", "img_emb.proj.1", f"{_EMBEDDER}.image_embedder.ff.net.0.proj", "cond channels", "cond"),
    ("image.down", "img_emb.proj.3", f"{_EMBEDDER}.image_embedder.ff.net.2", "embed cond", "embed"),
    ("image.norm_out", "img_emb.proj.4", f"{_EMBEDDER}.image_embedder.norm2", "embed", "embed"),
    ("head.out", "head.head", "proj_out", "channels embed", "channels"),
    ("blocks.cross_norm", "blocks.{layer}.norm3", "blocks.{layer}.norm2", "embed", "embed"),
)
_SINGLE = (
    ("image.positions", "img_emb.emb_pos", f"{_EMBEDDER}.image_embedder.pos_embed", "() kv_seq channels"),
    ("blocks.table", "blocks.{layer}.modulation", "blocks.{layer}.scale_shift_table", "() block embed"),
    ("head.table", "head.modulation", "scale_shift_table", "() block embed"),
)


def _linear(target: str, source: str, weight: str, bias: str, at: Mapping[str, int]) -> list[Rule]:
    return [
        Rule(target=f"{target}.weight", source=f"{source}.weight", dims=weight, at=at),
        Rule(target=f"{target}.bias", source=f"{source}.bias", dims=bias, at=at),
    ]


def _rules(layout: int) -> tuple[Rule, ...]:
    """The rules of a layout, by the place of its names: 0 for the original, 1 for diffusers."""
    found = [r for t, *names, w, b in _LINEAR for r in _linear(t, names[layout], w, b, {})]
    for (target, *names, weight, bias), block in _BLOCK_LINEAR:
        at = {} if block is None else {"block": block}
        found += _linear(target, f"blocks.{{layer}}.{names[layout]}", weight, bias, at)
    found += [
        Rule(target=f"{target}.weight", source=f"blocks.{{layer}}.{names[layout]}.weight", dims=_HEADS)
        for target, *names in _BLOCK_NORMS
    ]
    return (*found, *(Rule(target=t, source=names[layout], dims=dims) for t, *names, dims in _SINGLE))


UNUSED = {
    r"blocks\.\d+\.attn2\.norm_added_q\.weight": "no member of Wan norms the queries of its image branch",
    r"freqs": "rotary tables follow from the sizes",
}
LAYOUTS = (
    Layout(name="diffusers", rules=_rules(1), stem="diffusion_pytorch_model"),
    Layout(name="original", rules=_rules(0), stem="diffusion_pytorch_model"),
)


def _places(layout: str) -> dict[str, str]:
    """The tensors that tell the sizes, by what they are called here."""
    found = dict.fromkeys(("patch", "text.up", "time.features", "image.up", "head.out", "blocks.mlp.up"), "")
    rules = next(x.rules for x in LAYOUTS if x.name == layout) or ()
    named = {rule.target: rule.source.format(layer=0) for rule in rules}
    return {name: named[f"{name}.weight"] for name in found} | {"image.positions": named["image.positions"]}


def _shapes(tensors: Mapping[str, TensorInfo]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that tell the sizes, and how many blocks there are: of the layout that has more of them."""
    keys = (_places(layout.name) for layout in LAYOUTS)
    found = [{name: tuple(tensors[key].shape) for name, key in places.items() if key in tensors} for places in keys]
    blocks = {m.group(1) for m in (re.match(r"blocks\.(\d+)\.", key) for key in tensors) if m}
    most = max(found, key=lambda shapes: len(shapes))
    return {**most, "layers": (len(blocks),)}


def read_config(source: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Config:
    """The model that a config.json of diffusers or of the Wan repositories describes, or that the tensors alone tell.

    Of the image branch the original's config.json says nothing that holds for Wan2.1 and Wan2.2 alike, so that the
    tensors decide. Heads are taken to be 128 wide, as in every published model, where there is no config.json.

    Raises:
        InputError: fields missing or of another kind, and what these models do not do, by name.
    """
    if not source:
        return _from_tensors(_shapes(tensors))
    if "num_attention_heads" in source or source.get("_class_name") == "WanTransformer3DModel":
        return _from_diffusers(source)
    return _from_original(source, _shapes(tensors))


def _from_tensors(shapes: Mapping[str, tuple[int, ...]]) -> Config:
    needed = ("patch", "text.up", "time.features", "head.out", "blocks.mlp.up")
    missing = [name for name in needed if name not in shapes]
    if not missing and (len(shapes["patch"]) != 5 or shapes["patch"][0] % HEAD_DIM):
        missing = [f"patch of shape {shapes['patch']}, with heads of {HEAD_DIM}"]
    if missing:
        raise InputError(
            f"wan: without a config.json the sizes come from the tensors, and these do not tell: {', '.join(missing)}:"
            " name a config.json by config= (--config)"
        )
    embed, in_channels, *patch = shapes["patch"]
    return Config(
        in_channels=in_channels,
        out_channels=shapes["head.out"][0] // math.prod(patch),
        heads=embed // HEAD_DIM,
        head_dim=HEAD_DIM,
        layers=shapes["layers"][0],
        mlp=shapes["blocks.mlp.up"][0],
        text=shapes["text.up"][1],
        freq=shapes["time.features"][1],
        patch=(patch[0], patch[1], patch[2]),
        **_image_sizes(shapes),
    )


def _image_sizes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    positions = shapes.get("image.positions")
    return {
        "image": shapes["image.up"][1] if "image.up" in shapes else None,
        "image_positions": positions[1] if positions else None,
    }


def _malformed(source: Mapping[str, Any], sizes: Sequence[str], optional: Mapping[str, Any]) -> list[str]:
    """What is wrong with the numbers of a config; fields of `optional` may be missing or null."""

    def size(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value > 0

    problems = [f"{name} is missing" for name in sizes if source.get(name) is None]
    given = {n: source[n] for n in (*sizes, *optional) if source.get(n) is not None and n not in ("patch_size", "eps")}
    problems += [f"{n}={v!r} is not a whole number of at least 1" for n, v in given.items() if not size(v)]
    patch, eps = source.get("patch_size"), source.get("eps")
    if patch is not None and not (isinstance(patch, list | tuple) and len(patch) == 3 and all(map(size, patch))):
        problems.append(f"patch_size={patch!r} is not three whole numbers")
    if eps is not None and not (isinstance(eps, float) and eps > 0):
        problems.append(f"eps={eps!r} is not a number above 0")
    return problems


def _variants(source: Mapping[str, Any], qk_norms: tuple[Any, ...]) -> list[str]:
    """What of a config the model does not do."""
    problems = []
    if source.get("qk_norm", qk_norms[0]) not in qk_norms:
        problems.append(f"qk_norm={source['qk_norm']!r} is not supported: only {qk_norms[0]!r} is")
    if source.get("cross_attn_norm", True) is not True:
        problems.append(f"cross_attn_norm={source['cross_attn_norm']!r} is not supported: only true is")
    if list(source.get("window_size") or (-1, -1)) != [-1, -1]:
        problems.append(f"window_size={source['window_size']!r} is not supported: only [-1, -1] is")
    return problems


_DIFFUSERS = {  # field -> ours and, where it may be left out, the default of diffusers
    "num_attention_heads": ("heads", 40),
    "attention_head_dim": ("head_dim", 128),
    "in_channels": ("in_channels", 16),
    "out_channels": ("out_channels", 16),
    "text_dim": ("text", 4096),
    "freq_dim": ("freq", 256),
    "ffn_dim": ("mlp", 13824),
    "num_layers": ("layers", 40),
    "image_dim": ("image", None),
    "pos_embed_seq_len": ("image_positions", None),
}


def _from_diffusers(source: Mapping[str, Any]) -> Config:
    given = {name: source.get(name, default) for name, (_, default) in _DIFFUSERS.items()}
    given["out_channels"] = given["out_channels"] or given["in_channels"]
    added = source.get("added_kv_proj_dim")
    needed = [name for name, (_, default) in _DIFFUSERS.items() if default is not None]
    problems = _malformed({**source, **given}, needed, given) + _variants(source, ("rms_norm_across_heads",))
    if not problems and (added is None) != (given["image_dim"] is None):
        problems.append(f"image_dim={given['image_dim']} and added_kv_proj_dim={added}: one is missing")
    width = 0 if problems else given["num_attention_heads"] * given["attention_head_dim"]
    if not problems and added not in (None, width):
        problems.append(f"added_kv_proj_dim={added} is not supported: only the model's width, {width}, is")
    fail_if(problems, "config.json: not a WanTransformer3DModel as this zoo runs it")
    ours = {name: given[field] for field, (name, _) in _DIFFUSERS.items()}
    return Config(**ours, **_common(source))


def _common(source: Mapping[str, Any]) -> dict[str, Any]:
    eps = source.get("eps")
    return {"patch": tuple(source.get("patch_size") or (1, 2, 2)), "eps": float(1e-6 if eps is None else eps)}


_ORIGINAL = {  # field -> ours, and the default of the original
    "num_heads": ("heads", 16),
    "in_dim": ("in_channels", 16),
    "out_dim": ("out_channels", 16),
    "text_dim": ("text", 4096),
    "freq_dim": ("freq", 256),
    "ffn_dim": ("mlp", 8192),
    "num_layers": ("layers", 32),
}
_KINDS = ("t2v", "i2v", "flf2v", "ti2v")
_FRAMES_POSITIONS = 2 * 257  # the image encoder's tokens of a first and a last frame


def _from_original(source: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Config:
    given = {name: source.get(name, default) for name, (_, default) in _ORIGINAL.items()}
    given["dim"] = source.get("dim", 2048)
    problems = _malformed({**source, **given}, list(given), given) + _variants(source, (True,))
    kind = source.get("model_type", "t2v")
    if kind not in _KINDS:
        problems.append(f"model_type={kind!r} is not supported: {', '.join(_KINDS)} are")
    if not problems and given["dim"] % given["num_heads"]:
        problems.append(f"dim={given['dim']} does not divide by num_heads={given['num_heads']}")
    fail_if(problems, "config.json: not a WanModel as this zoo runs it")
    image = _image_sizes(shapes)
    if kind == "flf2v":
        image = {"image": image["image"] or 1280, "image_positions": image["image_positions"] or _FRAMES_POSITIONS}
    ours = {name: given[field] for field, (name, _) in _ORIGINAL.items()}
    return Config(**ours, head_dim=given["dim"] // given["num_heads"], **image, **_common(source))


def write_config(config: Config, layout: str) -> dict[str, Any]:
    """config.json as the layout has it."""
    common = {"patch_size": list(config.patch), "eps": config.eps, "cross_attn_norm": True}
    if layout == "diffusers":
        fields = {field: getattr(config, name) for field, (name, _) in _DIFFUSERS.items()}
        return {
            "_class_name": "WanTransformer3DModel",
            **fields,
            **common,
            "qk_norm": "rms_norm_across_heads",
            "added_kv_proj_dim": None if config.image is None else config.embed,
        }
    fields = {field: getattr(config, name) for field, (name, _) in _ORIGINAL.items()}
    return {
        "_class_name": "WanModel",
        "model_type": _kind(config),
        "dim": config.embed,
        **fields,
        **common,
        "qk_norm": True,
        "text_len": wan.TEXT_TOKENS,
    }


def _kind(config: Config) -> str:
    if config.image_positions is not None:
        return "flf2v"
    if config.image is not None or config.in_channels != config.out_channels:
        return "i2v"
    return "ti2v" if config.in_channels == 48 else "t2v"


FAMILY = FamilyRules(
    family="wan",
    part="transformer",
    layouts=LAYOUTS,
    unused=UNUSED,
    read_config=read_config,
    config_optional=True,
    write_config=write_config,
)
