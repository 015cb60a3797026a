"""Qwen2.5-VL's vision tower: published tensor lists matched, configs read, bits kept beside the language tower."""

import json

import numpy as np
import pytest
import transformers
from hollow import decoder_keys, qwen_vision_keys, write_hollow
from torch_qwen2_5_vl import build, values
from torch_values import arrays

from shardzoo import checkpoints
from shardzoo.convert.convert import convert, plan_conversion
from shardzoo.convert.export import export
from shardzoo.convert.families.qwen_vision import FAMILY, read_config
from shardzoo.errors import InputError
from shardzoo.zoo import layout, qwen2_5_vl
from shardzoo.zoo.mesh import make_mesh

PRESET = qwen2_5_vl.PRESETS["qwen2.5-vl-7b"]
PUBLISHED = {  # as the published file has it, with names of before transformers 5
    "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3,
    "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
}  # fmt: skip
TEXT = dict(layers=28, embed=3584, mlp=18944, heads=28, kv_heads=4, head_dim=128, vocab=152064, qkv_bias=True)
WHOLE = {"model_type": "qwen2_5_vl", "vision_config": PUBLISHED}
ALONE = {key.removeprefix("visual."): shape for key, shape in qwen_vision_keys().items()}


@pytest.mark.parametrize(
    ("keys", "config", "found", "others"),
    [
        (qwen_vision_keys() | decoder_keys(**TEXT), WHOLE, "transformers", 339),
        (
            qwen_vision_keys("model.") | decoder_keys(**TEXT, body="model.language_model."),
            WHOLE,
            "transformers, multimodal",
            339,
        ),
        (ALONE, {"model_type": "qwen2_5_vl_vision", **PUBLISHED}, "transformers, vision tower alone", 0),
    ],
)
def test_published_tensor_lists_are_matched_one_to_one(tmp_path, keys, config, found, others):
    plan = plan_conversion(write_hollow(tmp_path, keys, config), family="qwen2.5-vl-vision", component="visual")
    assert (plan.layout, plan.config) == (found, PRESET) and len(plan.skipped) == others and not plan.carried
    pieces = [piece.source for leaf in plan.leaves.values() for piece in leaf.pieces]
    assert len(pieces) == len(set(pieces)) == 390 and sorted([*pieces, *plan.skipped]) == sorted(keys)


def test_the_tower_alone_is_known_by_its_config(tmp_path):
    plan = plan_conversion(write_hollow(tmp_path, ALONE, {"model_type": "qwen2_5_vl_vision", **PUBLISHED}))
    assert plan.family == "qwen2.5-vl-vision"


def files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in (".safetensors", ".json")}


def test_both_towers_of_one_folder_there_and_back(tmp_path):
    """Each family takes its own tensors from the whole model; with the others carried along it comes back as it was."""
    model, _, vision, text = build()
    source = tmp_path / "source"
    model.save_pretrained(source)
    for family, part, config in (("qwen2.5-vl-vision", "visual", vision), ("decoder", "language_model", text)):
        convert(source, tmp_path / part, family=family, component=part, sync=False)
        live = checkpoints.restore(tmp_path / part, make_mesh(), family=family)
        got = layout.named(live)
        want = values(arrays(model), config)
        assert live.config == config and got.keys() == want.keys()
        for path, value in want.items():
            np.testing.assert_array_equal(np.asarray(got[path]), value, err_msg=path)
        convert(source, tmp_path / f"{part} and all", family=family, sync=False)
        export(tmp_path / f"{part} and all", tmp_path / f"{part} out")
        assert files(tmp_path / f"{part} out") == files(source)


def test_configs_are_read_as_transformers_writes_them():
    theirs = transformers.models.qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig(
        hidden_size=24, num_heads=3, window_size=56, fullatt_block_indexes=[1], in_channels=4, depth=2
    ).to_dict()
    config = read_config(json.loads(json.dumps(theirs)), {})
    assert (config.embed, config.heads, config.window, config.whole, config.channels) == (24, 3, 56, (1,), 4)
    assert read_config({"model_type": "qwen2_5_vl", "vision_config": theirs}, {}) == config
    assert FAMILY.read_config(WHOLE, {}) == PRESET


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'"]),
        ({"hidden_size": "1280", "patch_size": [14, 14]}, ["hidden_size='1280'", "patch_size=[14, 14]"]),
        ({"fullatt_block_indexes": "7"}, ["fullatt_block_indexes='7'"]),
        ({"num_heads": 7}, ["embed=1280 does not divide by 28"]),
    ],
)
def test_what_the_tower_does_not_do_is_refused_by_name(change, words):
    with pytest.raises(InputError) as error:
        read_config({"vision_config": {**PUBLISHED, **change}}, {})
    assert all(word in str(error.value) for word in words)
    with pytest.raises(InputError, match="vision_config is missing"):
        read_config({"model_type": "qwen2_5_vl"}, {})
