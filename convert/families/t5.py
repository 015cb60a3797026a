"""Encoders of UMT5, T5 v1.1 and MT5, as transformers, single-file exports and the Wan repositories name them.

Facts taken from the model files of transformers 5 and of Wan2.1. A full model's decoder is a part that is not run.
Single files (ComfyUI) have the names of transformers, no config.json, and the tokenizer as a tensor of bytes.
"""

import re
from collections.abc import Mapping
from typing import Any

from shardzoo.convert.families import FamilyRules, Layout
from shardzoo.convert.families.fields import malformed
from shardzoo.convert.rules import Rule
from shardzoo.convert.source import TensorInfo
from shardzoo.errors import InputError, fail_if
from shardzoo.zoo.t5 import Config

_HEADS = "(heads head_dim)"
_BIAS = "layer.0.SelfAttention.relative_attention_bias"

# Within a block: leaf, index in its `block` dim, name in transformers, name in the Wan repositories, dims.
_BLOCK = (
    ("attn_norm", None, "layer.0.layer_norm", "norm1", "embed"),
    *(("attn.qkv", i, f"layer.0.SelfAttention.{n}", f"attn.{n}", f"{_HEADS} embed") for i, n in enumerate("qkv")),
    ("attn.out", None, "layer.0.SelfAttention.o", "attn.o", f"embed {_HEADS}"),
    ("bias", None, _BIAS, "pos_embedding.embedding", "bucket heads"),
    ("mlp_norm", None, "layer.1.layer_norm", "norm2", "embed"),
    ("mlp.gate_up", 0, "layer.1.DenseReluDense.wi_0", "ffn.gate.0", "mlp embed"),
    ("mlp.gate_up", 1, "layer.1.DenseReluDense.wi_1", "ffn.fc1", "mlp embed"),
    ("mlp.down", None, "layer.1.DenseReluDense.wo", "ffn.fc2", "embed mlp"),
)


def _blocks(prefix: str, layout: int) -> list[Rule]:
    """The rules of the blocks in a layout, by the place of its names: 0 for transformers, 1 for Wan."""
    return [
        Rule(
            target=f"blocks.{leaf}.weight",
            source=f"{prefix}{names[layout]}.weight",
            dims=dims,
            at={} if block is None else {"block": block},
        )
        for leaf, block, *names, dims in _BLOCK
    ]


RULES = (
    Rule(target="embed.weight", source="{table}weight", dims="vocab embed"),
    *_blocks("encoder.block.{layer}.", 0),
    Rule(target="norm.weight", source="encoder.final_layer_norm.weight", dims="embed"),
    Rule(target="bias.weight", source=f"encoder.block.0.{_BIAS}.weight", dims="bucket heads"),
)
_ORIGINAL = (
    Rule(target="embed.weight", source="token_embedding.weight", dims="vocab embed"),
    *_blocks("blocks.{layer}.", 1),
    Rule(target="norm.weight", source="norm.weight", dims="embed"),
)
_DECODER = {"decoder.": "decoder", "lm_head.": "decoder"}
LAYOUTS = (
    Layout(
        name="transformers",
        roots={"table": "shared.", "tied": "encoder.embed_tokens.", "other": "decoder.embed_tokens."},
        other=_DECODER,
    ),
    Layout(
        name="transformers, no shared table",
        roots={"table": "encoder.embed_tokens.", "tied": "shared.", "other": "decoder.embed_tokens."},
        other=_DECODER,
    ),
    Layout(name="original", rules=_ORIGINAL, ties={}),
)
UNUSED = {r"spiece_model": "the tokenizer, as bytes, which no model runs"}

_SIZES = {  # field -> ours
    "vocab_size": "vocab",
    "d_model": "embed",
    "num_layers": "layers",
    "num_heads": "heads",
    "d_kv": "head_dim",
    "d_ff": "mlp",
}
_OPTIONAL = {"relative_attention_num_buckets": "buckets", "relative_attention_max_distance": "max_distance"}
_SHARED_BIAS = {"umt5": False, "t5": True, "mt5": True}


def read_config(source: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Config:
    """The encoder that a config.json of transformers describes, or that the tensors alone tell.

    No tensor tells the largest distance and the eps of the norms: those of all published models are taken then.

    Raises:
        InputError: fields missing or of another kind, and what the encoder does not do, by name.
    """
    if not source:
        return _from_tensors(tensors)
    kind = source.get("model_type")
    if kind not in _SHARED_BIAS:
        raise InputError(f"config.json: model_type={kind!r} is not one of the T5 family: {', '.join(_SHARED_BIAS)} are")
    problems = malformed(source, whole=(*_SIZES, *_OPTIONAL), numbers=("layer_norm_epsilon",))
    problems += [f"{name} is missing" for name in _SIZES if source.get(name) is None]
    projection = source.get("feed_forward_proj") or ("relu" if kind == "t5" else "gated-gelu")
    if projection != "gated-gelu":
        problems.append(f"feed_forward_proj={projection!r} is not supported: only 'gated-gelu' (T5 v1.1) is")
    quantized = source.get("quantization_config")
    if quantized is not None:
        problems.append(f"quantization_config={quantized!r} is not supported: use the unquantized export")
    fail_if(problems, f"config.json: not a {kind} encoder as this zoo runs it")
    given = {ours: source[field] for field, ours in {**_SIZES, **_OPTIONAL}.items() if source.get(field) is not None}
    eps = source.get("layer_norm_epsilon")
    return Config(**given, shared_bias=_SHARED_BIAS[kind], norm_eps=1e-6 if eps is None else float(eps))


def _from_tensors(tensors: Mapping[str, TensorInfo]) -> Config:
    """Sizes from shapes, under whichever names are there."""
    keys, block = _telling(tensors)
    wrong = [key for key in keys.values() if key not in tensors or len(tensors[key].shape) != 2]
    if wrong:
        raise InputError(
            f"t5: without a config.json the sizes come from the tensors, and {', '.join(wrong)} is missing or not a"
            " matrix: name a config.json by config= (--config)"
        )
    shapes = {name: tensors[key].shape for name, key in keys.items()}
    (buckets, heads), inner = shapes["bias"], shapes["q"][0]
    if inner % heads:
        raise InputError(
            f"t5: {keys['q']} has {inner} rows, which do not divide by the heads={heads} of {keys['bias']}"
        )
    layers = {int(m.group(1)) for m in (re.match(re.escape(block) + r"(\d+)\.", key) for key in tensors) if m}
    return Config(
        vocab=shapes["table"][0],
        embed=shapes["table"][1],
        layers=max(layers) + 1,
        heads=heads,
        head_dim=inner // heads,
        mlp=shapes["mlp"][0],
        buckets=buckets,
        shared_bias=max(layers) > 0 and keys["bias"].replace(f"{block}0.", f"{block}1.") not in tensors,
    )


def _telling(tensors: Mapping[str, TensorInfo]) -> tuple[dict[str, str], str]:
    """The keys of the tensors that tell the sizes, and what comes before a block's number, as the source names them."""
    tables = ("token_embedding.weight", "shared.weight", "encoder.embed_tokens.weight")
    table = next((key for key in tables if key in tensors), tables[1])
    layout, block = (1, "blocks.") if table == tables[0] else (0, "encoder.block.")
    leaves = {"q": ("attn.qkv", 0), "bias": ("bias", None), "mlp": ("mlp.gate_up", 0)}
    named = {(leaf, i): f"{block}0.{names[layout]}.weight" for leaf, i, *names, _ in _BLOCK}
    return {"table": table, **{name: named[place] for name, place in leaves.items()}}, block


def write_config(config: Config, layout: str) -> dict[str, Any] | None:
    """config.json of transformers; the Wan repositories have none for their text encoder."""
    if layout == "original":
        return None
    kind = "t5" if config.shared_bias else "umt5"
    fields = {field: getattr(config, ours) for field, ours in {**_SIZES, **_OPTIONAL}.items()}
    return {
        "architectures": [f"{kind.upper()}EncoderModel"],
        "model_type": kind,
        **fields,
        "layer_norm_epsilon": config.norm_eps,
        "feed_forward_proj": "gated-gelu",
        "is_encoder_decoder": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }


FAMILY = FamilyRules(
    family="t5",
    part="text_encoder",
    layouts=LAYOUTS,
    rules=RULES,
    ties={"{tied}weight": "embed.weight", "{other}weight": "embed.weight"},
    unused=UNUSED,
    read_config=read_config,
    config_optional=True,
    write_config=write_config,
)
