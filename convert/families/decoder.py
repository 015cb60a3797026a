"""Dense decoders, alone or in a multimodal model: Llama, Mistral, Qwen2 (and 2.5), Qwen3 as transformers saves them.

Facts taken from the configuration and modeling files of transformers 5 for these model types, and from published
configs (older field names included).
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from shardzoo.convert.families import FamilyRules, Layout
from shardzoo.convert.families.fields import other_math, two_ropes
from shardzoo.convert.rules import Rule
from shardzoo.convert.source import TensorInfo
from shardzoo.errors import InputError, fail_if
from shardzoo.strict_json import is_number
from shardzoo.zoo import decoder
from shardzoo.zoo.rope import Rope

_BLOCK = "{body}layers.{layer}."
_Q, _KV = "(heads head_dim)", "(kv_heads head_dim)"


def _attention(name: str, target: str, out: str, block: int | None = None) -> list[Rule]:
    source = f"{_BLOCK}self_attn.{name}_proj."
    at = {} if block is None else {"block": block}
    return [
        Rule(target=f"blocks.attn.{target}.weight", source=f"{source}weight", dims=f"{out} embed", at=at),
        Rule(target=f"blocks.attn.{target}.bias", source=f"{source}bias", dims=out, at=at),
    ]


def _mlp(name: str, target: str, dims: str, block: int | None = None) -> list[Rule]:
    source = f"{_BLOCK}mlp.{name}_proj."
    at = {} if block is None else {"block": block}
    return [
        Rule(target=f"blocks.mlp.{target}.weight", source=f"{source}weight", dims=dims, at=at),
        Rule(target=f"blocks.mlp.{target}.bias", source=f"{source}bias", dims=dims.split()[0], at=at),
    ]


RULES = (
    Rule(target="embed.weight", source="{body}embed_tokens.weight", dims="vocab embed"),
    Rule(target="blocks.attn_norm.weight", source=f"{_BLOCK}input_layernorm.weight", dims="embed"),
    *_attention("q", "q", _Q),
    *_attention("k", "kv", _KV, block=0),
    *_attention("v", "kv", _KV, block=1),
    Rule(target="blocks.attn.q_norm.weight", source=f"{_BLOCK}self_attn.q_norm.weight", dims="head_dim"),
    Rule(target="blocks.attn.k_norm.weight", source=f"{_BLOCK}self_attn.k_norm.weight", dims="head_dim"),
    Rule(target="blocks.attn.out.weight", source=f"{_BLOCK}self_attn.o_proj.weight", dims=f"embed {_Q}"),
    Rule(target="blocks.attn.out.bias", source=f"{_BLOCK}self_attn.o_proj.bias", dims="embed"),
    Rule(target="blocks.mlp_norm.weight", source=f"{_BLOCK}post_attention_layernorm.weight", dims="embed"),
    *_mlp("gate", "gate_up", "mlp embed", block=0),
    *_mlp("up", "gate_up", "mlp embed", block=1),
    *_mlp("down", "down", "embed mlp"),
    Rule(target="norm.weight", source="{body}norm.weight", dims="embed"),
    Rule(target="head.weight", source="{head}weight", dims="vocab embed"),
)

_PARTS = ("vision_tower", "vision_model", "visual", "multi_modal_projector")
LAYOUTS = (
    Layout(
        name="transformers",
        roots={"body": "model.", "head": "lm_head."},
        other={f"{part}.": part for part in _PARTS},
    ),
    Layout(name="transformers, base model", roots={"body": "", "head": "lm_head."}),
    Layout(
        name="transformers, multimodal",
        roots={"body": "model.language_model.", "head": "lm_head."},
        other={f"model.{part}.": part for part in _PARTS},
    ),
    Layout(
        name="transformers, multimodal, names before 5.0",
        roots={"body": "language_model.model.", "head": "language_model.lm_head."},
        other={f"{part}.": part for part in _PARTS},
    ),
)

UNUSED = {
    r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)": "rotary tables follow from the config",
    r".*\.self_attn\.(masked_bias|bias)": "the causal mask is computed",
    r"(.*\.)?position_ids": "positions are computed",
}

_TEXT = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"})
# Multimodal types and the type of their text model where the config leaves it out.
_MULTIMODAL = {
    "mistral3": "mistral",
    "llava": "llama",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
}
_THETA = {"qwen2_vl_text": 1e6, "qwen2_5_vl_text": 1e6, "qwen3_vl_text": 5e5}  # where a config leaves it out
_HEAD_DIM = {"qwen3": 128, "qwen3_vl_text": 128}  # the same: not embed / heads
_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32, "qwen2_vl_text": 8, "qwen2_5_vl_text": 8, "qwen3_vl_text": 32}
_WINDOW = {"mistral": 4096}
_MROPE = (16, 24, 24)  # the same, of multimodal rotary
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_ROPE_TYPES = ("default", "linear", "llama3")
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _whole(value: Any) -> bool:
    return type(value) is int and value >= 1


def _above_zero(value: Any) -> bool:
    return is_number(value) and value > 0


def _sizes(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(type(n) is int and n >= 0 for n in value)


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


# What each field that is read must be, where it is there and not null.
_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    name: kind
    for kind, names in {
        (_whole, "a whole number from 1"): (*_SIZES, "num_key_value_heads", "head_dim"),
        (lambda value: type(value) is int, "a whole number"): ("sliding_window", "max_window_layers"),
        (_above_zero, "a number above 0"): ("rms_norm_eps", "rope_theta", "partial_rotary_factor", *_LLAMA3),
        (lambda value: type(value) is bool, "true or false"): (
            "attention_bias",
            "mlp_bias",
            "tie_word_embeddings",
            "use_sliding_window",
        ),
        (lambda value: isinstance(value, Mapping), "an object"): ("rope_scaling", "rope_parameters"),
        (_names, "a list of names"): ("layer_types",),
        (_sizes, "a list of whole numbers"): ("mrope_section",),
    }.items()
    for name in names
}


def read_config(source: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> decoder.Config:
    """The decoder that a config.json of transformers describes; of a multimodal one, its text model.

    Args:
        source: the parsed file, with old (`rope_theta`, `rope_scaling`) or new (`rope_parameters`) names.
        tensors: the source's: they tell whether a `mistral3` that does not say so ties its embeddings.

    Raises:
        InputError: fields missing, and everything the decoder does not do, by name, with what it does.
    """
    text = _text_config(source)
    kind = text["model_type"]
    fail_if(
        _malformed({**source, **text}) or _malformed(_rope_fields(text)),
        "config.json: has values that are not of the kind that its fields hold",
    )
    problems = [*_unsupported(text, kind), *other_math({**_rope_fields(text), **text}), *two_ropes(text)]
    problems += _quantized(source)
    problems += [f"{name} is missing" for name in _SIZES if text.get(name) is None]
    fail_if(problems, f"config.json: model_type={kind!r} as given is not one that the decoder family runs")
    heads = text["num_attention_heads"]
    head_dim = _first(text.get("head_dim"), _HEAD_DIM.get(kind), text["hidden_size"] // heads)
    window, windowed = _sliding(text, kind, len(tensors))
    return decoder.Config(
        vocab=text["vocab_size"],
        embed=text["hidden_size"],
        layers=text["num_hidden_layers"],
        heads=heads,
        kv_heads=_first(text.get("num_key_value_heads", _KV_HEADS.get(kind)), heads),
        head_dim=head_dim,
        mlp=text["intermediate_size"],
        norm_eps=float(_first(text.get("rms_norm_eps"), 1e-6)),
        rope=dataclasses.replace(_rope(text, kind), sections=_sections(text, kind, head_dim)),
        qkv_bias=kind.startswith("qwen2") or _flag(text, "attention_bias", kind),
        out_bias=_flag(text, "attention_bias", kind),
        mlp_bias=kind == "llama" and bool(text.get("mlp_bias", False)),
        qk_norm=kind.startswith("qwen3"),
        tied=_tied(source, text, tensors),
        sliding_window=window,
        sliding_layers=windowed,
        max_positions=text["max_position_embeddings"],
    )


def _malformed(fields: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}={fields[name]!r} is not {words}"
        for name, (fits, words) in _FIELDS.items()
        if fields.get(name) is not None and not fits(fields[name])
    ]


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _flag(text: Mapping[str, Any], name: str, kind: str) -> bool:
    """`attention_bias`, which Mistral and Qwen2 do not have."""
    return (kind == "llama" or kind.startswith("qwen3")) and bool(text.get(name, False))


def _text_config(source: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's part of a config: nested, or (older exports) flat beside `vision_config`."""
    kind = str(source.get("model_type"))
    if kind in _TEXT:
        return dict(source)
    if kind not in _MULTIMODAL:
        known = ", ".join(sorted(_TEXT | set(_MULTIMODAL)))
        fail_if(
            [f"model_type={kind!r} is not one of those read: {known}"],
            "config.json: not a model of the decoder family",
        )
    nested = source.get("text_config") or {name: value for name, value in source.items() if name != "vision_config"}
    if not isinstance(nested, Mapping):
        raise InputError(f"config.json: text_config is a {type(nested).__name__} where an object is expected")
    inner = str(nested.get("model_type", _MULTIMODAL[kind]))
    inner = _MULTIMODAL.get(inner, inner)
    fail_if(
        [] if inner in _TEXT else [f"text_config: model_type={inner!r} is not one of {', '.join(sorted(_TEXT))}"],
        f"config.json: the text model of this {kind} is not of the decoder family",
    )
    return {**nested, "model_type": inner}


def _tied(source: Mapping[str, Any], text: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> bool:
    stated = [c["tie_word_embeddings"] for c in (source, text) if c.get("tie_word_embeddings") is not None]
    if stated:
        return any(stated)
    has_head = any(key.endswith("lm_head.weight") for key in tensors)
    return source["model_type"] == "mistral3" and not has_head  # the one type that ties where nothing is said


def _unsupported(text: Mapping[str, Any], kind: str) -> list[str]:
    problems = []
    if text.get("hidden_act", "silu") not in ("silu", "swish"):
        problems.append(f"hidden_act={text['hidden_act']!r} is not supported: only silu (swish) is")
    rope = _rope_fields(text)
    rope_type = _rope_type(rope, kind)
    if any(isinstance(value, Mapping) for value in rope.values()):
        problems.append("rope_parameters differ from layer to layer, which is not supported: only one set for all is")
    elif rope_type not in _ROPE_TYPES:
        problems.append(f"rope type {rope_type!r} is not supported: only {', '.join(_ROPE_TYPES)} are")
    else:
        wanted = {"linear": ("factor",), "llama3": _LLAMA3}.get(rope_type, ())
        problems += [f"rope type {rope_type!r}: {name} is missing" for name in wanted if rope.get(name) is None]
    partial = _first(rope.get("partial_rotary_factor"), text.get("partial_rotary_factor"), 1.0)
    if partial != 1.0:
        problems.append(f"partial_rotary_factor={partial} is not supported: only 1.0 is")
    types = text.get("layer_types") or ()
    other = {*types} - {"full_attention", "sliding_attention"}
    problems += [
        f"layer_types: {name!r} is not supported: full_attention and sliding_attention are" for name in sorted(other)
    ]
    return problems if other or kind not in ("llama", "mistral") else [*problems, *_mixed(text, kind, types)]


def _mixed(text: Mapping[str, Any], kind: str, types: Iterable[str]) -> Iterator[str]:
    """Layers of another kind than a model has whose layers are all alike."""
    windowed = kind == "mistral" and text.get("sliding_window", _WINDOW[kind]) is not None
    alike = "sliding_attention" if windowed else "full_attention"
    if {*types} - {alike}:
        yield f"layer_types={list(types)}: all layers of a {kind} with these fields are {alike}: correct one of them"


def _quantized(source: Mapping[str, Any]) -> list[str]:
    quantization = source.get("quantization_config")
    if quantization is None:
        return []
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    return [f"quantization_config: {method!r} weights are not supported: use the unquantized export"]


def _rope_fields(text: Mapping[str, Any]) -> dict[str, Any]:
    old = {"rope_theta": text["rope_theta"]} if text.get("rope_theta") is not None else {}
    return {**old, **(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}


def _rope_type(rope: Mapping[str, Any], kind: str) -> str:
    name = str(_first(rope.get("rope_type"), rope.get("type"), "default"))
    # For text alone all three position rows of multimodal rotary are equal, which is the ordinary kind.
    return "default" if name == "mrope" and kind.endswith("_vl_text") else name


def _rope(text: Mapping[str, Any], kind: str) -> Rope:
    rope = _rope_fields(text)
    name = _rope_type(rope, kind)
    theta = float(_first(rope.get("rope_theta"), _THETA.get(kind), 1e4))
    if name == "linear":
        return Rope(theta=theta, scaling="linear", factor=float(rope["factor"]))
    if name == "llama3":
        return Rope(
            theta=theta,
            scaling="llama3",
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_positions=int(rope["original_max_position_embeddings"]),
        )
    return Rope(theta=theta)


def _sections(text: Mapping[str, Any], kind: str, head_dim: int) -> tuple[int, ...]:
    """Pairs that time, row and column turn; Qwen3-VL mixes them in another way, which text alone does not show."""
    if kind not in ("qwen2_vl_text", "qwen2_5_vl_text"):
        return ()
    return tuple(_rope_fields(text).get("mrope_section") or (_MROPE if sum(_MROPE) * 2 == head_dim else ()))


def _sliding(text: Mapping[str, Any], kind: str, tensors: int) -> tuple[int | None, tuple[bool, ...] | None]:
    """The window and the layers that have it (None: all of them).

    Raises:
        InputError: more layers than there are tensors, where it takes a list of them.
    """
    window = text.get("sliding_window", _WINDOW.get(kind))
    if kind == "llama" or window is None:
        return None, None
    if kind == "mistral":
        return window, None
    if not text.get("use_sliding_window", False):
        return None, None
    layers = text["num_hidden_layers"]
    types = text.get("layer_types")
    first = _first(text.get("max_window_layers"), 80 if kind.endswith("_vl_text") else 28)
    if not types and 0 < tensors < layers:
        raise InputError(
            f"config.json: num_hidden_layers={layers} are more layers than the {tensors} tensors: correct it"
        )
    windowed = (
        tuple(name == "sliding_attention" for name in types) if types else tuple(i >= first for i in range(layers))
    )
    if not any(windowed):
        return None, None
    return window, None if all(windowed) else windowed


FAMILY = FamilyRules(
    family="decoder",
    part="language_model",
    layouts=LAYOUTS,
    rules=RULES,
    ties={"{head}weight": "embed.weight"},
    unused=UNUSED,
    read_config=read_config,
)
