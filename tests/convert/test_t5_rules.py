"""The T5 family: published tensor lists matched one to one in every layout, tiny models there and back bit for bit."""

import math

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from hollow import write_hollow
from tiny_models import bits, files
from torch_t5 import CASES, SIZES, build, values
from torch_values import arrays

from shardzoo import checkpoints
from shardzoo.convert.convert import convert, plan_conversion
from shardzoo.convert.export import export
from shardzoo.convert.families import rules_of
from shardzoo.convert.families.t5 import read_config, write_config
from shardzoo.errors import InputError
from shardzoo.zoo import layout, t5
from shardzoo.zoo.mesh import make_mesh

WAN = {  # name in transformers -> name in the Wan repositories
    "shared": "token_embedding",
    "encoder.final_layer_norm": "norm",
    "encoder.block.": "blocks.",
    "layer.0.layer_norm": "norm1",
    "layer.1.layer_norm": "norm2",
    "layer.0.SelfAttention.relative_attention_bias": "pos_embedding.embedding",
    "layer.0.SelfAttention": "attn",
    "layer.1.DenseReluDense.wi_0": "ffn.gate.0",
    "layer.1.DenseReluDense.wi_1": "ffn.fc1",
    "layer.1.DenseReluDense.wo": "ffn.fc2",
}


def as_wan(state):
    """A state dict of transformers under the names of the Wan repositories; the tied table once."""
    found = {}
    for key, value in state.items():
        for ours, theirs in WAN.items():
            key = key.replace(ours, theirs)
        found[key] = value
    return {key: value for key, value in found.items() if "embed_tokens" not in key}


def encoder_keys(preset):
    """Names and shapes that transformers gives the encoder, the tied table twice."""
    c = t5.PRESETS[preset]
    inner, keys = c.heads * c.head_dim, {"shared.weight": (c.vocab, c.embed)}
    keys |= {"encoder.embed_tokens.weight": (c.vocab, c.embed), "encoder.final_layer_norm.weight": (c.embed,)}
    for i in range(c.layers):
        attn, mlp = f"encoder.block.{i}.layer.0.", f"encoder.block.{i}.layer.1."
        keys |= {f"{attn}SelfAttention.{n}.weight": (inner, c.embed) for n in "qkv"}
        keys |= {f"{attn}SelfAttention.o.weight": (c.embed, inner)}
        keys |= {f"{mlp}DenseReluDense.wi_{n}.weight": (c.mlp, c.embed) for n in (0, 1)}
        keys |= {f"{mlp}DenseReluDense.wo.weight": (c.embed, c.mlp)}
        keys |= {f"{part}layer_norm.weight": (c.embed,) for part in (attn, mlp)}
        if i == 0 or not c.shared_bias:
            keys[f"{attn}SelfAttention.relative_attention_bias.weight"] = (32, c.heads)
    return keys


PUBLISHED = {"umt5-xxl": (243, 5_680_910_336), "t5-v1.1-xxl": (220, 4_762_310_656)}


def matched(folder, keys, config, **options):
    """The plan, after seeing that each tensor of the encoder is one piece and nothing is left over."""
    plan = plan_conversion(write_hollow(folder, keys, config), **options)
    pieces = [p.source for path, leaf in plan.leaves.items() if not path.startswith("carried") for p in leaf.pieces]
    assert len(pieces) == len(set(pieces))
    assert sorted([*pieces, *plan.aliases, *plan.carried]) == sorted(keys)
    return plan


@pytest.mark.parametrize("preset", PUBLISHED)
@pytest.mark.parametrize("with_config", [True, False])
def test_published_encoders_match_one_to_one(tmp_path, preset, with_config):
    keys, config = encoder_keys(preset), t5.PRESETS[preset]
    count, parameters = PUBLISHED[preset]
    assert len(keys) == count
    assert sum(map(math.prod, keys.values())) - config.vocab * config.embed == parameters
    plan = matched(tmp_path, keys, write_config(config, "transformers") if with_config else None)
    assert (plan.family, plan.layout, plan.config) == ("t5", "transformers", config)
    assert plan.aliases == {"encoder.embed_tokens.weight": "shared.weight"} and not plan.carried


def test_the_published_file_of_wan_matches_one_to_one(tmp_path):
    keys = as_wan(encoder_keys("umt5-xxl"))
    assert len(keys) == 242 and keys["blocks.23.pos_embedding.embedding.weight"] == (32, 64)
    plan = matched(tmp_path, keys, None)
    assert (plan.family, plan.layout, plan.config) == ("t5", "original", t5.PRESETS["umt5-xxl"])


@pytest.mark.parametrize(
    "table, layout_name",
    [("shared.weight", "transformers"), ("encoder.embed_tokens.weight", "transformers, no shared table")],
)
def test_single_files_with_one_table_and_a_tokenizer(tmp_path, table, layout_name):
    keys = {k: v for k, v in encoder_keys("t5-v1.1-xxl").items() if k == table or k not in t5_tables()}
    plan = matched(tmp_path, keys | {"spiece_model": (4096,)}, None)
    assert plan.layout == layout_name and plan.config == t5.PRESETS["t5-v1.1-xxl"]
    assert list(plan.carried) == ["spiece_model"] and "tokenizer" in plan.carried["spiece_model"]


def t5_tables():
    return ("shared.weight", "encoder.embed_tokens.weight")


def test_scaled_fp8_is_named_as_such(tmp_path):
    keys = encoder_keys("umt5-xxl")
    keys |= {k.replace(".weight", ".scale_weight"): () for k in keys if "SelfAttention" in k or "DenseRelu" in k}
    with pytest.raises(InputError, match="scale_weight"):
        plan_conversion(write_hollow(tmp_path, keys, None))


def stored(checkpoint, config, dtype=np.float32):
    model = checkpoints.restore(checkpoint, make_mesh(), family="t5")
    assert model.config == config
    return {k: np.asarray(v) for k, v in layout.named(model).items()}


def assert_values(checkpoint, model, config):
    want = values(arrays(model), config)
    got = stored(checkpoint, config)
    assert got.keys() == want.keys()
    for path, value in want.items():
        np.testing.assert_array_equal(got[path], value, err_msg=path)


@pytest.mark.parametrize("name", ["umt5", "t5", "mt5", "umt5, few buckets"])
def test_a_folder_of_transformers_there_and_back(tmp_path, name):
    model, config = build(name)
    model.save_pretrained(tmp_path / "source", max_shard_size="20KB")
    convert(tmp_path / "source", tmp_path / "ckpt", sync=False)
    assert_values(tmp_path / "ckpt", model, config)
    export(tmp_path / "ckpt", tmp_path / "out")
    assert files(tmp_path / "out") == files(tmp_path / "source")


FULL = {
    "umt5, odd sizes": (transformers.UMT5ForConditionalGeneration, transformers.UMT5Config),
    "t5, odd sizes": (transformers.T5ForConditionalGeneration, transformers.T5Config),
}


@pytest.mark.parametrize("name", FULL)
def test_of_a_full_model_the_encoder_is_run_and_the_decoder_carried(tmp_path, name):
    """Saved by torch, so that all three names of the shared table are there."""
    cls, config_cls = FULL[name]
    model = cls(config_cls(**SIZES, tie_word_embeddings=name.startswith("umt5"))).eval()
    (tmp_path / "source").mkdir()
    model.config.save_pretrained(tmp_path / "source")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    torch.save(state, tmp_path / "source" / "pytorch_model.bin")
    report = convert(tmp_path / "source", tmp_path / "ckpt", sync=False)
    assert_values(tmp_path / "ckpt", model, CASES[name][2])
    assert report.aliases == {f"{part}.embed_tokens.weight": "shared.weight" for part in ("encoder", "decoder")}
    decoder = {k for k in state if k.startswith(("decoder.block", "decoder.final", "lm_head"))}
    assert set(report.carried) == decoder and len(decoder) > 40
    export(tmp_path / "ckpt", tmp_path / "out")
    assert_same(load(tmp_path / "out"), state)
    alone = plan_conversion(tmp_path / "source", component="text_encoder")
    assert not alone.carried and set(alone.skipped) == decoder


def load(folder):
    return {k: v for f in folder.glob("*.safetensors") for k, v in safetensors.torch.load_file(f).items()}


def assert_same(got, want):
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert got[key].dtype == value.dtype and got[key].shape == value.shape
        np.testing.assert_array_equal(bits(got[key]), bits(value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pth_of_wan_there_and_back(tmp_path, dtype):
    model, config = build("umt5")
    state = {k: v.detach().to(dtype) for k, v in as_wan(dict(model.state_dict())).items()}
    torch.save(state, tmp_path / "models_t5_umt5-xxl-enc-bf16.pth")
    convert(tmp_path / "models_t5_umt5-xxl-enc-bf16.pth", tmp_path / "ckpt", sync=False)
    if dtype == torch.float32:
        assert_values(tmp_path / "ckpt", model, config)
    export(tmp_path / "ckpt", tmp_path / "out")
    assert_same(load(tmp_path / "out"), state)


@pytest.mark.parametrize("name", ["umt5", "t5, odd sizes"])
def test_a_single_file_there_and_back(tmp_path, name):
    """Names of transformers, no config, the tokenizer inside: the file comes back byte for byte."""
    model, config = build(name)
    state = {k: v for k, v in model.state_dict().items() if k != "shared.weight"}
    state["spiece_model"] = torch.arange(256, dtype=torch.uint8)
    (tmp_path / "source").mkdir()
    source = tmp_path / "source" / "umt5_xxl.safetensors"
    safetensors.torch.save_file({k: v.detach().clone() for k, v in state.items()}, source)
    convert(source, tmp_path / "ckpt", sync=False)
    assert_values(tmp_path / "ckpt", model, config)
    export(tmp_path / "ckpt", tmp_path / "out")
    assert source.read_bytes() in files(tmp_path / "out").values()


def test_configs_are_read_as_transformers_writes_them():
    for name, ((_, config_cls), sizes, config) in CASES.items():
        assert read_config(config_cls(**sizes).to_dict(), {}) == config, name
        if name != "mt5":
            assert read_config(write_config(config, "transformers"), {}) == config
    assert write_config(t5.PRESETS["umt5-xxl"], "original") is None
    theirs = transformers.UMT5Config(**{k: v for k, v in write_config(CASES["umt5"][2], "transformers").items()})
    assert theirs.dense_act_fn == "gelu_new" and theirs.is_gated_act and theirs.d_kv == 8


UMT5_JSON = write_config(CASES["umt5"][2], "transformers")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "bert"}, ["'bert'", "umt5, t5, mt5"]),
        ({"feed_forward_proj": "relu"}, ["feed_forward_proj='relu'", "gated-gelu"]),
        ({"model_type": "t5", "feed_forward_proj": None}, ["feed_forward_proj='relu'"]),
        ({"d_model": None, "num_heads": None}, ["d_model is missing", "num_heads is missing"]),
        ({"d_kv": "64", "d_ff": 0, "num_layers": True}, ["d_kv='64'", "d_ff=0", "num_layers=True"]),
        ({"layer_norm_epsilon": "1e-6"}, ["layer_norm_epsilon='1e-6'"]),
        ({"relative_attention_num_buckets": 2}, ["buckets=2"]),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, ["bitsandbytes"]),
    ],
)
def test_what_the_encoder_does_not_do_is_refused_by_name(change, words):
    with pytest.raises(InputError) as error:
        read_config({**UMT5_JSON, **change}, {})
    assert all(word in str(error.value) for word in words)


def test_tensors_that_do_not_tell_the_sizes_are_named(tmp_path):
    keys = as_wan(encoder_keys("umt5-xxl"))
    del keys["blocks.0.pos_embedding.embedding.weight"]
    with pytest.raises(InputError, match=r"blocks\.0\.pos_embedding(.|\n)*config="):
        plan_conversion(write_hollow(tmp_path / "a", keys, None))
    keys["blocks.0.pos_embedding.embedding.weight"] = (32, 63)
    with pytest.raises(InputError, match="heads=63"):
        plan_conversion(write_hollow(tmp_path / "b", keys, None))


def test_no_rule_is_without_a_leaf():
    family = rules_of("t5")
    both = {k for config in t5.PRESETS.values() for k in layout.named(t5.declare(config))}
    assert {rule.target for rule in family.rules} == both
    assert {r.target for r in family.layouts[-1].rules} == set(layout.named(t5.declare(t5.PRESETS["umt5-xxl"])))
