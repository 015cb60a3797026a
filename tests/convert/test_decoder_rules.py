"""The decoder family: published tensor lists matched one to one, configs read as transformers reads them."""

import collections
import math

import numpy as np
import pytest
import transformers
from hollow import decoder_keys, pixtral_keys, qwen_vision_keys, write_hollow

from shardzoo.convert.convert import plan_conversion
from shardzoo.convert.families import rules_of
from shardzoo.convert.families.decoder import read_config
from shardzoo.convert.rules import gaps
from shardzoo.convert.source import TensorInfo
from shardzoo.errors import InputError
from shardzoo.zoo import layout as zoo_layout

QWEN3_4B = {"layers": 36, "embed": 2560, "mlp": 9728, "heads": 32, "kv_heads": 8, "head_dim": 128, "vocab": 151936}
QWEN3_8B = {**QWEN3_4B, "embed": 4096, "mlp": 12288}
MISTRAL = {"layers": 40, "embed": 5120, "mlp": 32768, "heads": 32, "kv_heads": 8, "head_dim": 128, "vocab": 131072}
QWEN_VL = {"layers": 28, "embed": 3584, "mlp": 18944, "heads": 28, "kv_heads": 4, "head_dim": 128, "vocab": 152064}


def hf(model_type, sizes, **more):
    return {
        "model_type": model_type,
        "vocab_size": sizes["vocab"],
        "hidden_size": sizes["embed"],
        "intermediate_size": sizes["mlp"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        **more,
    }


def mistral3(**more):
    text = hf("mistral", MISTRAL, head_dim=128, sliding_window=None, rope_theta=1e9)
    return {"model_type": "mistral3", "text_config": text, "vision_config": {"model_type": "pixtral"}, **more}


QWEN_VL_TEXT = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
PUBLISHED = {
    # name: (keys, config, tensors in all, parameters in all, tensors of the text model)
    "qwen3-4b": (
        decoder_keys(**QWEN3_4B, qk_norm=True),
        hf("qwen3", QWEN3_4B, head_dim=128, rope_theta=1e6, tie_word_embeddings=True),
        399,
        4_022_468_096 + 151936 * 2560,
        398,
    ),
    "qwen3-8b": (
        decoder_keys(**QWEN3_8B, qk_norm=True),
        hf("qwen3", QWEN3_8B, head_dim=128, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        399,
        8_190_735_360,
        399,
    ),
    "mistral-small-3.2, names of transformers 5": (
        pixtral_keys("model.") | decoder_keys(**MISTRAL, body="model.language_model."),
        mistral3(tie_word_embeddings=False),
        585,
        24_011_361_280,
        363,
    ),
    "mistral-small-3.2, as published": (
        pixtral_keys() | decoder_keys(**MISTRAL, body="language_model.model.", head="language_model.lm_head.weight"),
        mistral3(),
        585,
        24_011_361_280,
        363,
    ),
    "qwen2.5-vl-7b, names of transformers 5": (
        qwen_vision_keys("model.") | decoder_keys(**QWEN_VL, body="model.language_model.", qkv_bias=True),
        {"model_type": "qwen2_5_vl", "text_config": hf("qwen2_5_vl_text", QWEN_VL, **QWEN_VL_TEXT)},
        729,
        8_292_166_656,
        339,
    ),
    "qwen2.5-vl-7b, as published": (
        qwen_vision_keys() | decoder_keys(**QWEN_VL, qkv_bias=True),
        {**hf("qwen2_5_vl", QWEN_VL, **QWEN_VL_TEXT), "vision_config": {"model_type": "qwen2_5_vl"}},
        729,
        8_292_166_656,
        339,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_tensor_lists_are_matched_one_to_one(tmp_path, name):
    keys, config, tensors, parameters, text = PUBLISHED[name]
    assert len(keys) == tensors
    assert sum(map(math.prod, keys.values())) == parameters
    plan = plan_conversion(write_hollow(tmp_path, keys, config))
    pieces = [piece for leaf in plan.leaves.values() for piece in leaf.pieces]
    used = collections.Counter(piece.source for piece in pieces)
    assert set(used.values()) == {1}
    assert set(used) | set(plan.aliases) == set(keys) and not plan.skipped
    assert len(used) - len(plan.carried) == text
    for piece in pieces:
        assert piece.take == tuple((0, size) for size in keys[piece.source])
    params = zoo_layout.named(plan.declared)
    assert gaps([piece for piece in pieces if piece.target in params], params) == []
    tied = sum(math.prod(keys[key]) for key in plan.aliases)
    assert plan.bytes_read == plan.bytes_written == 2 * (parameters - tied)


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "mistral" in name or "vl" in name])
def test_a_component_leaves_out_the_other_parts_by_name(tmp_path, name):
    keys, config, _, _, text = PUBLISHED[name]
    folder = write_hollow(tmp_path, keys, config)
    plan = plan_conversion(folder, component="language_model")
    assert not plan.carried and len(plan.skipped) == len(keys) - text
    assert all("component='language_model'" in why for why in plan.skipped.values())
    assert {why.split("'")[1] for why in plan.skipped.values()} <= {"visual", "vision_tower", "multi_modal_projector"}
    with pytest.raises(InputError, match="component='vision'"):
        plan_conversion(folder, component="vision")


def test_a_base_model_without_a_prefix_is_read(tmp_path):
    keys = decoder_keys(**QWEN3_4B, body="", head=None, qk_norm=True)
    plan = plan_conversion(write_hollow(tmp_path, keys, PUBLISHED["qwen3-4b"][1]))
    assert plan.layout == "transformers, base model" and not plan.prefix
    assert sum(len(leaf.pieces) for leaf in plan.leaves.values()) == len(keys)


def test_rotary_buffers_are_kept_aside_with_a_reason(tmp_path):
    keys, config, *_ = PUBLISHED["qwen3-8b"]
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": (64,) for i in range(36)}
    plan = plan_conversion(write_hollow(tmp_path, keys | buffers, config))
    assert plan.carried == dict.fromkeys(buffers, "rotary tables follow from the config")


SMALL = {"layers": 4, "embed": 64, "mlp": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 100}


def tensors(*keys):
    return {
        key: TensorInfo(key=key, shape=(), dtype=np.dtype("float32"), file=0, nbytes=4, memory=(key,), offset=0)
        for key in keys
    }


def read(**fields):
    return read_config(fields, {})


@pytest.mark.parametrize(
    ("kind", "config", "more"),
    [
        ("llama", transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
        ("llama", transformers.LlamaConfig, {"head_dim": 32, "tie_word_embeddings": True}),
        ("mistral", transformers.MistralConfig, {"sliding_window": 17}),
        ("mistral", transformers.MistralConfig, {"sliding_window": None}),
        ("qwen2", transformers.Qwen2Config, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
        ("qwen2", transformers.Qwen2Config, {"use_sliding_window": False, "sliding_window": 8}),
        ("qwen3", transformers.Qwen3Config, {"attention_bias": True}),
        ("qwen3", transformers.Qwen3Config, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}),
    ],
)
def test_configs_that_transformers_writes_are_read_as_it_reads_them(kind, config, more):
    theirs = config(**{k: v for k, v in hf(kind, SMALL, **more).items() if k != "model_type"})
    ours = read_config(theirs.to_dict(), {})
    assert (ours.vocab, ours.embed, ours.layers, ours.mlp) == (100, 64, 4, 96)
    assert (ours.heads, ours.kv_heads, ours.head_dim) == (4, 2, getattr(theirs, "head_dim", None) or 16)
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"] and ours.rope.scaling == "none"
    assert ours.tied == theirs.tie_word_embeddings and ours.norm_eps == theirs.rms_norm_eps
    bias = getattr(theirs, "attention_bias", False)
    assert (ours.qkv_bias, ours.out_bias, ours.mlp_bias) == (bias or kind == "qwen2", bias, more.get("mlp_bias", False))
    assert ours.qk_norm == (kind == "qwen3")
    types = (
        getattr(theirs, "layer_types", None) or ["sliding_attention" if theirs.sliding_window else "full_attention"] * 4
        if kind != "llama"
        else ["full_attention"] * 4
    )
    windows = [
        ours.sliding_window if ours.sliding_layers is None or on else None for on in ours.sliding_layers or [True] * 4
    ]
    assert windows == [theirs.sliding_window if name == "sliding_attention" else None for name in types]


def test_sizes_that_old_configs_leave_out_follow_the_model_type():
    llama = hf("llama", SMALL)
    del llama["num_key_value_heads"]
    assert read(**llama).kv_heads == 4 and read(**llama).head_dim == 16 and read(**llama).rope.theta == 1e4
    assert read(**hf("qwen3", SMALL)).head_dim == 128
    assert read(**hf("mistral", SMALL)).sliding_window == 4096
    assert read(**hf("qwen2_5_vl_text", SMALL)).rope.theta == 1e6
    assert read(**hf("qwen2_5_vl_text", SMALL)).rope.sections == ()
    assert read(**hf("qwen2_5_vl_text", QWEN_VL)).rope.sections == (16, 24, 24)


def test_sections_of_multimodal_rotary():
    def sections(kind, *given, **more):
        scaling = {"type": "mrope", "mrope_section": list(given)}
        return read(**hf(kind, QWEN_VL, rope_scaling=scaling, **more)).rope.sections

    assert sections("qwen2_5_vl_text", 16, 24, 24) == (16, 24, 24)
    assert sections("qwen2_vl_text", 4, 30, 30) == (4, 30, 30)
    assert sections("qwen3_vl_text", 24, 20, 20, head_dim=128) == ()
    with pytest.raises(InputError, match=r"head_dim=128 is not twice the 8 of rope\.sections"):
        sections("qwen2_5_vl_text", 2, 3, 3)
    with pytest.raises(InputError, match="mrope_section='x' is not a list of whole numbers"):
        read(**hf("qwen2_5_vl_text", QWEN_VL, rope_scaling={"type": "mrope", "mrope_section": "x"}))


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ],
)
def test_rope_is_read_from_old_and_new_names(rope):
    ours = read(**hf("llama", SMALL, **rope)).rope
    assert (ours.theta, ours.scaling, ours.factor, ours.original_positions) == (5e5, "llama3", 8.0, 8192)
    assert (ours.low_freq_factor, ours.high_freq_factor) == (1.0, 4.0)


@pytest.mark.parametrize(
    ("ending", "name"),
    [("qweight", "GPTQ, AWQ"), ("weight.absmax", "bitsandbytes"), ("weight_scale", "scaled fp8")],
)
def test_weights_that_others_quantized_are_named_in_one_line(tmp_path, ending, name):
    config = hf("llama", SMALL)
    config.pop("quantization_config", None)
    keys = {
        f"model.layers.{i}.self_attn.{p}_proj.{e}": (8,) for i in range(4) for p in "qkvo" for e in ("weight", ending)
    }
    with pytest.raises(
        InputError, match=rf"holds a quantized export \({name}\) .*give the weights that it was"
    ) as error:
        plan_conversion(write_hollow(tmp_path, keys, config))
    assert "\n" not in str(error.value)


def test_linear_rope_is_read():
    ours = read(**hf("llama", SMALL, rope_theta=1e4, rope_scaling={"type": "linear", "factor": 2.0})).rope
    assert (ours.scaling, ours.factor) == ("linear", 2.0)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["'yarn'", "default, linear, llama3"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, ["'dynamic'"]),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, ["low_freq_factor is missing"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["differ from layer to layer"]),
        ({"hidden_act": "gelu"}, ["'gelu'", "silu"]),
        ({"hidden_act": "gelu", "partial_rotary_factor": 0.5}, ["'gelu'", "partial_rotary_factor=0.5"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["'awq'"]),
        ({"layer_types": ["chunked_attention"] * 4}, ["'chunked_attention'"]),
        ({"layer_types": ["sliding_attention"] * 4}, ["all layers of a llama", "full_attention"]),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 4}, ["all layers of a mistral"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping=30.0"]),
        ({"embedding_multiplier": 12.0, "residual_multiplier": 0.2}, ["embedding_multiplier=12.0", "residual_mul"]),
        ({"is_causal": False}, ["is_causal=False"]),
        ({"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}}, ["llama_4_scaling_beta=0.1"]),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_type": "default"}},
            ["rope_scaling and rope_parameters differ in factor, rope_type"],
        ),
        ({"model_type": "gemma2"}, ["'gemma2'", "llama, llava, mistral"]),
        ({"model_type": "llava", "text_config": {"model_type": "phi"}}, ["'phi'"]),
    ],
)
def test_what_the_decoder_does_not_do_is_refused_by_name(more, words):
    with pytest.raises(InputError) as error:
        read(**hf("llama", SMALL) | more)
    assert all(word in str(error.value) for word in words)


def test_fields_of_other_models_that_change_nothing_are_read():
    plain = {"embedding_multiplier": 1.0, "final_logit_softcapping": None, "alibi": False, "is_causal": True}
    types = {"layer_types": ["full_attention"] * 4, "sliding_window": None}
    same = {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    expected = read(**hf("mistral", SMALL, rope_theta=1e4, sliding_window=None))
    assert read(**hf("mistral", SMALL, **plain, **types, **same)) == expected


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "head_dim",
)
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in SIZES for value in ("64", 0, -1, 64.0, True, [64], {})),
        *((name, value) for name in ("rms_norm_eps", "rope_theta") for value in ("1e-5", [1], float("nan"), True)),
        *((name, value) for name in ("rms_norm_eps", "rope_theta") for value in (0, -1e-6)),
        *((name, value) for name in ("rope_scaling", "rope_parameters") for value in ([8.0], "linear", 2)),
        *((name, "true") for name in ("tie_word_embeddings", "attention_bias", "use_sliding_window")),
        *(("layer_types", value) for value in ("full_attention", [1, 2], [["full_attention"]], {})),
        ("sliding_window", "4096"),
        ("max_window_layers", "28"),
    ],
)
def test_values_that_a_field_cannot_hold_are_refused_by_name(name, value):
    config = {**hf("qwen3", QWEN3_8B, head_dim=128), name: value}
    with pytest.raises(InputError, match=rf"{name}=.* is not "):
        read_config(config, {})


@pytest.mark.parametrize("name", LLAMA3)
@pytest.mark.parametrize("value", ["8", [8], {}])
def test_malformed_numbers_of_rope_are_refused(name, value):
    config = hf("llama", QWEN3_8B, rope_scaling={"rope_type": "llama3", **LLAMA3, name: value})
    with pytest.raises(InputError, match=rf"{name}=|differ from layer to layer"):
        read_config(config, {})


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": ["llama"]},
        {"model_type": {}},
        {"model_type": None},
        {"model_type": "mistral3", "text_config": [1]},
        {"model_type": "mistral3", "text_config": {"model_type": ["mistral"]}},
        hf("llama", QWEN3_8B, rope_scaling={"rope_type": ["llama3"]}),
        hf("llama", QWEN3_8B, quantization_config=3),
        hf("llama", QWEN3_8B, hidden_act=["silu"]),
    ],
)
def test_malformed_configs_are_refused_and_end_in_no_traceback(tmp_path, config):
    with pytest.raises(InputError):
        read_config(config, {})
    write_hollow(tmp_path, decoder_keys(**{**QWEN3_8B, "layers": 2}), config)
    with pytest.raises(InputError):
        plan_conversion(tmp_path)


def test_null_is_as_good_as_nothing_where_there_is_a_default():
    names = ("rms_norm_eps", "rope_theta", "rope_scaling", "layer_types", "attention_bias", "tie_word_embeddings")
    plain = {key: value for key, value in hf("qwen3", QWEN3_8B, head_dim=128).items() if key not in names}
    assert read_config(plain | dict.fromkeys(names), {}) == read_config(plain, {})


def test_missing_sizes_are_all_named():
    with pytest.raises(InputError, match=r"hidden_size is missing(.|\n)*num_hidden_layers is missing"):
        read(model_type="llama", vocab_size=10)


def test_a_mistral3_that_does_not_say_so_is_tied_where_there_is_no_head():
    config = mistral3()
    del config["text_config"]["tie_word_embeddings"]
    assert read_config(config, tensors("language_model.model.norm.weight")).tied
    assert not read_config(config, tensors("language_model.lm_head.weight")).tied


def test_no_rule_is_without_a_leaf():
    family = rules_of("decoder")
    every = hf("llama", SMALL, attention_bias=True, mlp_bias=True)
    both = {
        *zoo_layout.named(family.declare(read(**every))),
        *zoo_layout.named(family.declare(read(**hf("qwen3", SMALL)))),
    }
    assert {rule.target for rule in family.rules} == both
