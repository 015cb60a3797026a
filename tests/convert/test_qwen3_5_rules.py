"""The Qwen3.5 family: published tensor lists matched one to one, configs as transformers reads them, round trips."""

import collections
import json
import math

import numpy as np
import pytest
import torch
import transformers
from hollow import write_hollow
from qwen3_5_keys import BOTH, LAYERS, ROPE, TEXT, mtp_keys, text_keys, visual_keys
from safetensors.numpy import load_file, save_file
from torch_qwen3_5 import CASES, build, values
from torch_values import arrays

from shardzoo import checkpoints
from shardzoo.convert.convert import convert, plan_conversion
from shardzoo.convert.export import export
from shardzoo.convert.families.qwen3_5 import FAMILY, read_config
from shardzoo.convert.rules import gaps, volume
from shardzoo.convert.verify import verify
from shardzoo.errors import InputError
from shardzoo.zoo import layout as zoo_layout
from shardzoo.zoo.families import find_preset

PUBLISHED = {
    # name: (keys, config, tensors in all, parameters in all)
    "text": (text_keys("model."), TEXT, 851, 26_895_998_464),
    "multimodal": (text_keys("model.language_model.") | visual_keys(), BOTH, 1184, 27_356_728_560),
    "multimodal with mtp": (
        text_keys("model.language_model.") | visual_keys() | mtp_keys(),
        BOTH,
        1199,
        27_781_427_952,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_tensor_lists_are_matched_one_to_one(tmp_path, name):
    keys, config, tensors, parameters = PUBLISHED[name]
    assert len(keys) == tensors and sum(map(math.prod, keys.values())) == parameters
    plan = plan_conversion(write_hollow(tmp_path, keys, config))
    assert plan.declared.config == find_preset("qwen3-5/qwen3.5-27b")[1]
    pieces = [piece for leaf in plan.leaves.values() for piece in leaf.pieces]
    taken = collections.Counter()
    for piece in pieces:
        taken[piece.source] += volume(piece.take)
    assert taken == {key: math.prod(shape) for key, shape in keys.items()} and not plan.skipped
    params = zoo_layout.named(plan.declared)
    assert gaps([piece for piece in pieces if piece.target in params], params) == []
    assert len(keys) - len(plan.carried) == 851
    assert {why.split("'")[1] for why in plan.carried.values()} == {
        "text": set(), "multimodal": {"visual"}, "multimodal with mtp": {"visual", "mtp"},
    }[name]  # fmt: skip
    assert plan.bytes_read == plan.bytes_written == 2 * parameters


def test_layers_come_from_their_places(tmp_path):
    plan = plan_conversion(write_hollow(tmp_path, PUBLISHED["text"][0], TEXT))
    sources = {path: [p.source for p in leaf.pieces] for path, leaf in plan.leaves.items()}
    layers = [int(key.split(".")[2]) for key in sources["delta.mixer.a_log"]]
    assert layers == [i for i in range(LAYERS) if i % 4 != 3]
    assert [int(key.split(".")[2]) for key in sources["attn.mixer.out.weight"]] == list(range(3, LAYERS, 4))


def save(folder, named, config):
    folder.mkdir()
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", ["text", "multimodal", "base model", "next"])
@pytest.mark.parametrize("case", ["published-pattern", "thirds"])
def test_each_layout_comes_back_bit_for_bit(tmp_path, name, case):
    model, config = build(case, next=name == "next")
    theirs = {k: v.astype(np.float16) for k, v in arrays(model).items()}
    theirs |= {k: v.astype(np.float32) for k, v in arrays(model).items() if k.endswith("A_log")}  # as some files have
    saved = model.config.to_dict()
    draw = np.random.default_rng(0)
    other = {"mtp.norm.weight": draw.normal(size=(4,)), "mtp.layers.0.mlp.up_proj.weight": draw.normal(size=(5, 4))}
    if name == "multimodal":
        theirs = {k.replace("model.", "model.language_model.", 1): v for k, v in theirs.items()}
        saved = {"model_type": "qwen3_5", "text_config": saved, "vision_config": {}}
        other["model.visual.pos_embed.weight"] = draw.normal(size=(7, 3))
    if name == "base model":
        theirs = {k.removeprefix("model."): v for k, v in theirs.items()}
    theirs |= {k: v.astype(np.float16) for k, v in other.items()}
    source = save(tmp_path / "source", theirs, saved)
    convert(source, tmp_path / "ckpt", sync=False)
    verify(tmp_path / "ckpt", source)
    ckpt = checkpoints.open(tmp_path / "ckpt")
    assert ckpt.config == config
    want = values(arrays(model), config, "transformers, Qwen3-Next" if name == "next" else "transformers")
    for path, value in want.items():
        kept = value if path.endswith("a_log") else value.astype(np.float16)
        np.testing.assert_array_equal(ckpt.read(path), kept)
    export(tmp_path / "ckpt", tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert load_file(tmp_path / "out/model.safetensors").keys() == theirs.keys()


def test_tied_embeddings_are_one_leaf(tmp_path):
    model, config = build("two-super-blocks")
    named = {**arrays(model), "lm_head.weight": arrays(model)["model.embed_tokens.weight"]}
    source = save(tmp_path / "source", named, model.config.to_dict())
    convert(source, tmp_path / "ckpt", sync=False)
    assert config.tied and "head.weight" not in zoo_layout.named(checkpoints.open(tmp_path / "ckpt").declared)
    export(tmp_path / "ckpt", tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors").keys() == named.keys()


@pytest.mark.parametrize("case", CASES)
def test_configs_that_transformers_writes_are_read_as_it_reads_them(case):
    theirs = transformers.Qwen3_5TextConfig(**CASES[case])
    with torch.device("meta"):
        model = transformers.Qwen3_5ForCausalLM(theirs)
    ours = read_config(theirs.to_dict(), {})
    kinds = ["full_attention" if (i + 1) % ours.interval == 0 else "linear_attention" for i in range(ours.layers)]
    assert kinds == theirs.layer_types
    assert ours.rotary_dim == 2 * len(model.model.rotary_emb.inv_freq)
    assert list(ours.sections) == model.model.rotary_emb.mrope_section
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"] and ours.tied == theirs.tie_word_embeddings


def test_what_a_config_leaves_out_is_what_transformers_takes():
    few = {k: TEXT[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    few |= {"num_attention_heads": 24, "model_type": "qwen3_5_text"}
    theirs = transformers.Qwen3_5TextConfig(**few)
    assert read_config(few, {}) == read_config(theirs.to_dict(), {})
    assert read_config({**few, "full_attention_interval": 2}, {}).interval == 2
    nulls = ("head_dim", "rms_norm_eps", "rope_parameters", "layer_types", "attention_bias")
    assert read_config({**few, **dict.fromkeys(nulls)}, {}) == read_config(few, {})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "qwen3_moe"}, "'qwen3_moe' is not one of this family"),
        ({"model_type": "qwen3_next"}, "num_experts=512: 64 of the 64 layers are mixtures of experts"),
        ({"model_type": "qwen3_next", "num_experts": 4, "mlp_only_layers": [0]}, "63 of the 64 layers"),
        ({"model_type": "qwen3_5", "text_config": {"model_type": "qwen3"}}, "text_config: model_type='qwen3'"),
        ({"model_type": "qwen3_5", "text_config": [1]}, "text_config=.* is not an object"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
        ({"hidden_size": "5120"}, "hidden_size='5120' is not a whole number"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
        ({"rope_parameters": {**ROPE, "mrope_interleaved": False}}, "mrope_interleaved=False"),
        ({"rope_parameters": {**ROPE, "mrope_section": [11, "a", 10]}}, "mrope_section="),
        ({"rope_parameters": {**ROPE, "rope_theta": "1e7"}}, "rope_theta='1e7' is not a number"),
        ({"layer_types": ["full_attention"] + ["linear_attention"] * 63}, "no other pattern is supported"),
        ({"layer_types": ["linear_attention"] * 64}, "no other pattern is supported"),
        ({"layer_types": "linear_attention"}, "no other pattern is supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config="),
        ({"linear_num_key_heads": 5}, "value_heads=48 does not divide by key_heads=5"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, words):
    with pytest.raises(InputError, match=words):
        read_config({**TEXT, **change}, {})


def test_experts_are_refused_before_a_byte_of_them_is_read(tmp_path):
    """Qwen3-Next-80B by its config: 512 experts in every layer, in a file that is one long hole."""
    keys = {k: v for k, v in text_keys("model.").items() if ".mlp." not in k}
    block = "model.layers.{}.mlp.experts.{}.{}_proj.weight"
    keys |= {block.format(i, e, n): (512, 2048) for i in (0, 63) for e in range(512) for n in ("gate", "up")}
    source = write_hollow(tmp_path / "source", keys, {**TEXT, "model_type": "qwen3_next"})
    with pytest.raises(InputError) as refused:
        convert(source, tmp_path / "ckpt", sync=False)
    for part in ("num_experts=512: 64 of the 64 layers are mixtures of experts", "choose a model without experts"):
        assert part in str(refused.value)
    assert not (tmp_path / "ckpt").exists()


def test_a_file_of_another_depth_is_named(tmp_path):
    keys = {k: v for k, v in PUBLISHED["text"][0].items() if ".layers.63." not in k and ".layers.62." not in k}
    with pytest.raises(InputError, match="layers 0 to 61, the config says 64"):
        plan_conversion(write_hollow(tmp_path, keys, TEXT))


def test_no_rule_is_without_a_leaf():
    leaves = zoo_layout.named(FAMILY.declare(find_preset("qwen3-5/qwen3.5-27b")[1]))
    assert all({rule.target for rule in FAMILY.rules_in(layout)} == set(leaves) for layout in FAMILY.layouts)


def test_a_model_is_written_in_the_other_packing(tmp_path):
    """Plainly ordered projections become fused ones, and back."""
    model, config = build("thirds")
    named = arrays(model)
    source = save(tmp_path / "source", named, model.config.to_dict())
    convert(source, tmp_path / "ckpt", sync=False)
    export(tmp_path / "ckpt", tmp_path / "fused", layout="transformers, Qwen3-Next")
    fused = load_file(next((tmp_path / "fused").glob("*.safetensors")))
    theirs, _ = build("thirds", next=True)
    assert {k: v.shape for k, v in fused.items()} == {k: v.shape for k, v in arrays(theirs).items()}
    same, want = values(fused, config, "transformers, Qwen3-Next"), values(named, config)
    assert all(np.array_equal(same[path], want[path]) for path in want)
