"""Checks of the fields of a config.json that families share."""

from collections.abc import Iterable, Mapping
from typing import Any

from shardzoo.strict_json import is_number

MOST = 2**48  # that a size or a ratio is
# What configs of other language models have that changes what is computed, and the values at which it does not (null is
# one of them in any case).
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "final_logit_softcapping": (0,),
    "attn_logit_softcapping": (0,),
    "logit_softcapping": (0,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "attention_multiplier": (),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "scale_emb": (1,),
    "scale_depth": (),
    "query_pre_attn_scalar": (),
    "attention_temperature": (1,),
    "attn_temperature_tuning": (False,),
    "llama_4_scaling_beta": (0,),
    "clip_qkv": (),
    "alibi": (False,),
    "parallel_attn": (False,),
    "use_parallel_residual": (False,),
    "is_causal": (True,),
    "use_bidirectional_attention": (False,),
    "no_rope_layers": ([],),
    "num_local_experts": (0, 1),
}


def malformed(source: Mapping[str, Any], *, whole: Iterable[str] = (), numbers: Iterable[str] = ()) -> list[str]:
    """What is wrong with the fields named, where they are there and not null.

    Args:
        source: the parsed config.
        whole: fields that hold whole numbers of at least 1.
        numbers: fields that hold finite numbers.
    """
    whole = tuple(whole)
    problems = [
        f"{name}={source[name]!r} is not a whole number of at least 1"
        for name in whole
        if source.get(name) is not None and not (type(source[name]) is int and source[name] >= 1)
    ]
    problems += too_large({name: source.get(name) for name in whole})
    return problems + [
        f"{name}={source[name]!r} is not a number"
        for name in numbers
        if source.get(name) is not None and not is_number(source[name])
    ]


def too_large(sizes: Mapping[str, Any]) -> list[str]:
    """Sizes that nothing has, whose products floats might not hold."""
    return [
        f"{name}={size} is beyond any size: correct it"
        for name, size in sizes.items()
        if type(size) in (int, float) and abs(size) > MOST
    ]


def other_math(fields: Mapping[str, Any]) -> list[str]:
    """Fields of other language models that would change what is computed, by name: no family reads them."""
    return [
        f"{name}={fields[name]!r} is not supported: this family computes without it"
        for name, neutral in _NEUTRAL.items()
        if fields.get(name) is not None and fields[name] not in neutral
    ]


def two_ropes(text: Mapping[str, Any]) -> list[str]:
    """Whether the old and the new name of the rotary settings are both there and say different things."""
    old, new = text.get("rope_scaling"), text.get("rope_parameters")
    if not (isinstance(old, Mapping) and isinstance(new, Mapping) and old and new):
        return []
    plain = (None, "mrope", "default")  # which of them does not matter where sections are the same
    kinds = [x.get("rope_type") or x.get("type") for x in (old, new)]
    one, other = ({**x, "rope_type": None if k in plain else k} for x, k in zip((old, new), kinds, strict=True))
    differ = [name for name in sorted({*one, *other} - {"type", "rope_theta"}) if one.get(name) != other.get(name)]
    return [f"rope_scaling and rope_parameters differ in {', '.join(differ)}: leave one of them out"] if differ else []
