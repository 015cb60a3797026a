"""Qwen3.5's vision tower: published tensor lists matched, configs read, bits kept beside the text model."""

import json
import math

import numpy as np
import pytest
import transformers
from hollow import write_hollow
from qwen3_5_keys import BOTH, mtp_keys, text_keys, visual_keys
from torch_qwen3_5_vision import build, values
from torch_values import arrays

from shardzoo import checkpoints
from shardzoo.convert.convert import convert, plan_conversion
from shardzoo.convert.export import export
from shardzoo.convert.families.qwen3_5_vision import FAMILY, read_config
from shardzoo.errors import InputError
from shardzoo.zoo import layout, qwen3_5_vision
from shardzoo.zoo.mesh import make_mesh

PRESET = qwen3_5_vision.PRESETS["qwen3.5-27b"]
PUBLISHED = {
    "depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
    "in_channels": 3, "out_hidden_size": 5120, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "num_position_embeddings": 2304, "deepstack_visual_indexes": [], "model_type": "qwen3_5",
}  # fmt: skip
WHOLE = {**BOTH, "vision_config": PUBLISHED}
TEXT = text_keys("model.language_model.")
ALONE = {key.removeprefix("model.visual."): shape for key, shape in visual_keys().items()}
BY_ITSELF = {**PUBLISHED, "model_type": "qwen3_5_vision"}


@pytest.mark.parametrize(
    ("keys", "config", "found", "others"),
    [
        (TEXT | visual_keys(), WHOLE, "transformers, multimodal", 851),
        (TEXT | visual_keys() | mtp_keys(), WHOLE, "transformers, multimodal", 866),
        (ALONE, BY_ITSELF, "transformers, vision tower alone", 0),
    ],
)
def test_published_tensor_lists_are_matched_one_to_one(tmp_path, keys, config, found, others):
    plan = plan_conversion(write_hollow(tmp_path, keys, config), family="qwen3-5-vision", component="visual")
    assert (plan.layout, plan.config) == (found, PRESET) and len(plan.skipped) == others and not plan.carried
    pieces = [piece.source for leaf in plan.leaves.values() for piece in leaf.pieces]
    assert len(pieces) == len(set(pieces)) == 333 and sorted([*pieces, *plan.skipped]) == sorted(keys)
    assert plan.bytes_read == 2 * sum(math.prod(shape) for shape in ALONE.values()) == 2 * 460_730_096


def test_the_tower_alone_is_known_by_its_config(tmp_path):
    plan = plan_conversion(write_hollow(tmp_path, ALONE, BY_ITSELF))
    assert plan.family == "qwen3-5-vision"


def files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in (".safetensors", ".json")}


def test_both_parts_of_one_folder_there_and_back(tmp_path):
    """Each family takes its own tensors from the whole model; with the others carried along it comes back as it was."""
    model, _, vision, text = build()
    source = tmp_path / "source"
    model.save_pretrained(source)
    for family, part, config in (("qwen3-5-vision", "visual", vision), ("qwen3-5", "language_model", text)):
        convert(source, tmp_path / part, family=family, component=part, sync=False)
        live = checkpoints.restore(tmp_path / part, make_mesh(), family=family)
        got, want = layout.named(live), values(arrays(model), config)
        assert live.config == config and got.keys() == want.keys()
        for path, value in want.items():
            np.testing.assert_array_equal(np.asarray(got[path]), value, err_msg=path)
        convert(source, tmp_path / f"{part} and all", family=family, sync=False)
        export(tmp_path / f"{part} and all", tmp_path / f"{part} out")
        assert files(tmp_path / f"{part} out") == files(source)


def test_configs_are_read_as_transformers_writes_them():
    theirs = transformers.models.qwen3_5.configuration_qwen3_5.Qwen3_5VisionConfig(
        hidden_size=24, num_heads=3, in_channels=4, depth=2, num_position_embeddings=7
    ).to_dict()
    config = read_config(json.loads(json.dumps(theirs)), {})
    assert (config.embed, config.heads, config.positions, config.channels, config.out) == (24, 3, 7, 4, 3584)
    assert read_config({"model_type": "qwen3_5", "vision_config": theirs}, {}) == config
    assert read_config({"vision_config": {}}, {}) == read_config(
        {"vision_config": transformers.Qwen3_5Config().vision_config.to_dict()}, {}
    )
    assert FAMILY.read_config(WHOLE, {}) == PRESET


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'"]),
        ({"hidden_size": "1152", "patch_size": [16, 16]}, ["hidden_size='1152'", "patch_size=[16, 16]"]),
        ({"deepstack_visual_indexes": [8, 16, 24]}, ["deepstack_visual_indexes=[8, 16, 24] is not supported"]),
        ({"model_type": "qwen3_vl"}, ["model_type='qwen3_vl' is not supported"]),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": "1"}}, ["rope type 'yarn'", "rope_theta='1'"]),
        ({"rope_parameters": 3}, ["rope_parameters=3 is not an object"]),
        ({"num_heads": 7}, ["embed=1152 does not divide by 28"]),
    ],
)
def test_what_the_tower_does_not_do_is_refused_by_name(change, words):
    with pytest.raises(InputError) as error:
        read_config({"vision_config": {**PUBLISHED, **change}}, {})
    assert all(word in str(error.value) for word in words)
    with pytest.raises(InputError, match="vision_config is missing"):
        read_config({"model_type": "qwen3_5"}, {})


def test_no_rule_is_without_a_leaf():
    leaves = layout.named(FAMILY.declare(PRESET))
    assert {rule.target for rule in FAMILY.rules} == set(leaves)
