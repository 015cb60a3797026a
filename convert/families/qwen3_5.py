"""Qwen3.5, alone or in a multimodal model, and Qwen3-Next without experts, as transformers saves them.

Facts taken from the configuration and modeling files of transformers 5 for `qwen3_5` and `qwen3_next`, and from
published tensor lists. Qwen3-Next has DeltaNet's projections fused, key head by key head; it is the same model, but for
its mixture-of-experts layers, which this family does not run: the published sizes, which have them, are refused. The
vision tower and the layer that predicts further tokens (`mtp`) are carried along: they are not run either.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shardzoo.convert.families import FamilyRules, Layout
from shardzoo.convert.families.fields import malformed, other_math, too_large, two_ropes
from shardzoo.convert.rules import Rule
from shardzoo.convert.source import TensorInfo
from shardzoo.errors import InputError, fail_if
from shardzoo.zoo.layout import LAYER, Param
from shardzoo.zoo.qwen3_5 import AXES, Config
from shardzoo.zoo.rope import Rope

_KEYS, _VALUES = "key_heads key_dim", "value_heads value_dim"


def _interval(params: Mapping[str, Param]) -> int:
    delta, attn = (params[f"{kind}.mixer_norm.weight"].size(LAYER) for kind in ("delta", "attn"))
    return delta // attn + 1


def _delta_number(index: int, params: Mapping[str, Param]) -> int:
    return index + index // (_interval(params) - 1)


def _attn_number(index: int, params: Mapping[str, Param]) -> int:
    return (index + 1) * _interval(params) - 1


_NUMBERS = {"delta": _delta_number, "attn": _attn_number}


def _in_layers(kind: str, target: str, source: str, dims: str, **more: Any) -> Rule:
    name = f"{{body}}layers.{{layer}}.{source}"
    return Rule(target=f"{kind}.{target}", source=name, dims=dims, number=_NUMBERS[kind], **more)


def _both(kind: str) -> Iterator[Rule]:
    """What both kinds of layer have."""
    yield _in_layers(kind, "mixer_norm.weight", "input_layernorm.weight", "embed")
    yield _in_layers(kind, "mlp_norm.weight", "post_attention_layernorm.weight", "embed")
    for block, name in enumerate(("gate", "up")):
        yield _in_layers(kind, "mlp.gate_up.weight", f"mlp.{name}_proj.weight", "mlp embed", at={"block": block})
    yield _in_layers(kind, "mlp.down.weight", "mlp.down_proj.weight", "embed mlp")


def _mixer(target: str, source: str, dims: str, **more: Any) -> Rule:
    return _in_layers("delta", f"mixer.{target}", f"linear_attn.{source}", dims, **more)


def _apart() -> Iterator[Rule]:
    """DeltaNet's projections, plainly ordered."""
    for block in range(2):
        start = {0: f"{block} {_KEYS}"}
        yield _mixer("qk.weight", "in_proj_qkv.weight", f"({_KEYS}) embed", at={"block": block}, start=start)
    start = {0: f"2 {_KEYS}"}
    yield _mixer("vz.weight", "in_proj_qkv.weight", f"({_VALUES}) embed", at={"block": 0}, start=start)
    yield _mixer("vz.weight", "in_proj_z.weight", f"({_VALUES}) embed", at={"block": 1})
    for block, name in enumerate("ba"):
        yield _mixer("ba.weight", f"in_proj_{name}.weight", "value_heads embed", at={"block": block})


def _by_key_head(
    dim: str, block: int, rows: Callable[..., tuple[int, int]]
) -> Callable[[Mapping[str, Param]], Iterator]:
    """The places of a leaf whose source has rows of each key head together.

    `rows(group, key_dim, value_dim, block)` is how many rows a key head has, and where in them this block begins.
    """

    def each(params: Mapping[str, Param]) -> Iterator[tuple[Mapping, Mapping]]:
        keys, values = params["delta.mixer.conv_qk"], params["delta.mixer.conv_v"]
        heads = keys.size("key_heads")
        group = values.size("value_heads") // heads
        width, first = rows(group, keys.size("key_dim"), values.size("value_dim"), block)
        wide = 1 if dim == "key_heads" else group
        for head in range(heads):
            yield {"block": block, dim: (head * wide, (head + 1) * wide)}, {0: head * width + first}

    return each


def _qk_rows(group: int, key_dim: int, value_dim: int, block: int) -> tuple[int, int]:
    return 2 * key_dim + 2 * group * value_dim, block * key_dim


def _vz_rows(group: int, key_dim: int, value_dim: int, block: int) -> tuple[int, int]:
    return 2 * key_dim + 2 * group * value_dim, 2 * key_dim + block * group * value_dim


def _ba_rows(group: int, key_dim: int, value_dim: int, block: int) -> tuple[int, int]:
    return 2 * group, block * group


def _fused() -> Iterator[Rule]:
    """DeltaNet's projections as Qwen3-Next has them: for each key head q, k, v and gate; and b and a."""
    for block in range(2):
        keys, values, pairs = (
            _by_key_head(dim, block, rows)
            for dim, rows in (("key_heads", _qk_rows), ("value_heads", _vz_rows), ("value_heads", _ba_rows))
        )
        yield _mixer("qk.weight", "in_proj_qkvz.weight", f"({_KEYS}) embed", each=keys)
        yield _mixer("vz.weight", "in_proj_qkvz.weight", f"({_VALUES}) embed", each=values)
        yield _mixer("ba.weight", "in_proj_ba.weight", "value_heads embed", each=pairs)


def _delta() -> Iterator[Rule]:
    """What DeltaNet has beside its projections."""
    rule = _mixer
    for block in range(2):
        start = {0: f"{block} {_KEYS}"}
        yield rule("conv_qk", "conv1d.weight", f"({_KEYS}) () taps", at={"block": block}, start=start)
    yield rule("conv_v", "conv1d.weight", f"({_VALUES}) () taps", start={0: f"2 {_KEYS}"})
    yield rule("a_log", "A_log", "value_heads")
    yield rule("dt_bias", "dt_bias", "value_heads")
    yield rule("norm.weight", "norm.weight", "value_dim")
    yield rule("out.weight", "out_proj.weight", "embed (value_heads value_dim)")


def _attn() -> Iterator[Rule]:
    def rule(target: str, name: str, dims: str, **more: Any) -> Rule:
        return _in_layers("attn", f"mixer.{target}.weight", f"self_attn.{name}.weight", dims, **more)

    yield rule("qg", "q_proj", "(heads block head_dim) embed")
    yield rule("kv", "k_proj", "(kv_heads head_dim) embed", at={"block": 0})
    yield rule("kv", "v_proj", "(kv_heads head_dim) embed", at={"block": 1})
    yield rule("out", "o_proj", "embed (heads head_dim)")
    yield rule("q_norm", "q_norm", "head_dim")
    yield rule("k_norm", "k_norm", "head_dim")


_SAME = (
    Rule(target="embed.weight", source="{body}embed_tokens.weight", dims="vocab embed"),
    *_both("delta"),
    *_delta(),
    *_both("attn"),
    *_attn(),
    Rule(target="norm.weight", source="{body}norm.weight", dims="embed"),
    Rule(target="head.weight", source="{head}weight", dims="vocab embed"),
)
RULES, FUSED = (*_SAME, *_apart()), (*_SAME, *_fused())
_OTHER = {"model.visual.": "visual", "mtp.": "mtp"}
LAYOUTS = (
    Layout(
        name="transformers, multimodal",
        roots={"body": "model.language_model.", "head": "lm_head."},
        other=_OTHER,
    ),
    Layout(name="transformers", roots={"body": "model.", "head": "lm_head."}, other=_OTHER),
    Layout(name="transformers, base model", roots={"body": "", "head": "lm_head."}, other={"mtp.": "mtp"}),
    Layout(name="transformers, Qwen3-Next", roots={"body": "model.", "head": "lm_head."}, other=_OTHER, rules=FUSED),
)
UNUSED = {r".*\.rotary_emb\.inv_freq": "rotary tables follow from the config"}

_SIZES = {  # field -> ours
    "vocab_size": "vocab",
    "hidden_size": "embed",
    "num_hidden_layers": "layers",
    "intermediate_size": "mlp",
    "num_attention_heads": "heads",
}
_OPTIONAL = {  # field -> ours, and the default of transformers
    "num_key_value_heads": ("kv_heads", 4),
    "head_dim": ("head_dim", 256),
    "linear_conv_kernel_dim": ("taps", 4),
    "linear_num_key_heads": ("key_heads", 16),
    "linear_num_value_heads": ("value_heads", 32),
    "linear_key_head_dim": ("key_dim", 128),
    "linear_value_head_dim": ("value_dim", 128),
    "max_position_embeddings": ("max_positions", 32768),
}
_NUMBER_FIELDS = ("rms_norm_eps", "rope_theta", "partial_rotary_factor")
_TEXT, _MULTIMODAL, _NEXT = "qwen3_5_text", "qwen3_5", "qwen3_next"
_NEXT_DEFAULTS = {"num_key_value_heads": 2, "num_experts": 512, "decoder_sparse_step": 1}
_ONLY = {"hidden_act": "silu", "attention_bias": False}  # fields that may say one thing only
_INTERVAL, _ROTARY_PART, _SECTIONS, _THETA = 4, 0.25, (11, 11, 10), 1e4


def read_config(source: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Config:
    """The text model that a config.json of transformers describes; of a multimodal one, its `text_config`.

    Raises:
        InputError: fields missing or of another kind, and everything this family does not do, by name.
    """
    text = _text(source)
    if text.get("model_type") == _NEXT:
        text = {**text, **{name: _or(text, name, value) for name, value in _NEXT_DEFAULTS.items()}}
    rope = {**_object(text, "rope_scaling"), **_object(text, "rope_parameters")}
    fields = {**text, **{name: value for name, value in rope.items() if value is not None}}
    whole = (*_SIZES, *_OPTIONAL, "full_attention_interval")
    problems = malformed(fields, whole=whole, numbers=_NUMBER_FIELDS)
    problems += [f"{name} is missing" for name in _SIZES if text.get(name) is None]
    problems += [
        f"{name}={text[name]!r} is not supported: only {value!r} is"
        for name, value in _ONLY.items()
        if text.get(name) not in (None, value)
    ]
    problems += too_large({"partial_rotary_factor": fields.get("partial_rotary_factor")})
    problems += [*_rope_problems(fields), *_quantized(source), *_quantized(text), *_experts(text)]
    problems += [*other_math(fields), *two_ropes(text)]
    fail_if(problems, "config.json: not a Qwen3.5 as this zoo runs it")
    given = {ours: text[field] for field, ours in _SIZES.items()}
    given |= {ours: _or(text, field, default) for field, (ours, default) in _OPTIONAL.items()}
    return Config(
        **given,
        interval=_interval_of(text, given["layers"]),
        rotary_dim=int(given["head_dim"] * _or(fields, "partial_rotary_factor", _ROTARY_PART)),
        sections=tuple(_or(fields, "mrope_section", _SECTIONS)),
        rope=Rope(theta=float(_or(fields, "rope_theta", _THETA))),
        norm_eps=float(_or(text, "rms_norm_eps", 1e-6)),
        tied=any(bool(c.get("tie_word_embeddings")) for c in (source, text)),
    )


def _or(fields: Mapping[str, Any], name: str, default: Any) -> Any:
    value = fields.get(name)
    return default if value is None else value


def _object(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = _or(fields, name, {})
    if not isinstance(value, Mapping):
        raise InputError(f"config.json: {name}={value!r} is not an object: correct it")
    return value


def _text(source: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = source.get("model_type")
    if kind not in (_TEXT, _MULTIMODAL, _NEXT):
        known = f"{_TEXT}, {_MULTIMODAL} and {_NEXT}"
        raise InputError(f"config.json: model_type={kind!r} is not one of this family: {known} are")
    if kind != _MULTIMODAL:
        return source
    nested = _object(source, "text_config")
    inner = _or(nested, "model_type", _TEXT)
    if inner != _TEXT:
        raise InputError(f"config.json: text_config: model_type={inner!r} is not of this family: only {_TEXT} is")
    return nested


def _rope_problems(fields: Mapping[str, Any]) -> Iterator[str]:
    kind = _or(fields, "rope_type", _or(fields, "type", "default"))
    if kind not in ("default", "mrope"):
        yield f"rope type {kind!r} is not supported: only 'default' is"
    if fields.get("mrope_interleaved", True) not in (None, True):
        yield f"mrope_interleaved={fields['mrope_interleaved']!r} is not supported: only true is"
    sections = _or(fields, "mrope_section", list(_SECTIONS))
    if not isinstance(sections, list) or len(sections) != AXES or not all(type(n) is int and n >= 0 for n in sections):
        yield f"mrope_section={sections!r} is not a list of {AXES} whole numbers"


def _experts(text: Mapping[str, Any]) -> Iterator[str]:
    """Layers of Qwen3-Next that are mixtures of experts; the other models of the family have none."""
    experts, step, layers = (text.get(name) for name in ("num_experts", "decoder_sparse_step", "num_hidden_layers"))
    if not (type(experts) is type(step) is type(layers) is int) or min(experts, step, layers) < 1:
        return
    listed = text.get("mlp_only_layers")
    plain = listed if isinstance(listed, list) else []
    spared = {i for i in plain if type(i) is int and 0 <= i < layers and (i + 1) % step == 0}
    mixed = layers // step - len(spared)
    if mixed:
        yield (
            f"num_experts={experts}: {mixed} of the {layers} layers are mixtures of experts, which are not"
            " supported: only dense ones are (num_experts=0); choose a model without experts"
        )


def _quantized(fields: Mapping[str, Any]) -> Iterator[str]:
    if fields.get("quantization_config") is not None:
        yield f"quantization_config={fields['quantization_config']!r} is not supported: use the unquantized export"


def _interval_of(text: Mapping[str, Any], layers: int) -> int:
    """How many layers there are to an attention layer, from the list of their kinds or from a number."""
    types = text.get("layer_types")
    if types is None:
        return _or(text, "full_attention_interval", _INTERVAL)
    counted = isinstance(types, list) and len(types) == layers and "full_attention" in types
    interval = types.index("full_attention") + 1 if counted else 0
    if not counted or types != [
        "linear_attention" if (i + 1) % interval else "full_attention" for i in range(len(types))
    ]:
        raise InputError(
            f"config.json: layer_types={types!r} is not linear_attention with full_attention at equal distances, the"
            f" last of the {layers} layers included: no other pattern is supported"
        )
    return interval


FAMILY = FamilyRules(
    family="qwen3-5",
    part="language_model",
    layouts=LAYOUTS,
    rules=RULES,
    ties={"{head}weight": "embed.weight"},
    unused=UNUSED,
    read_config=read_config,
)
