"""Configs that say sizes beyond reason: refused at once and by name, with no memory taken for what they describe."""

import contextlib
import json
import resource
from pathlib import Path

import pytest
import tiny_images
import tiny_models
import tiny_wan
from torch_qwen3_5 import build

from shardzoo.convert.convert import plan_conversion
from shardzoo.errors import InputError

ROOM = 2 << 30  # bytes of addresses beyond those in use
LAYERS = {  # source -> the field that counts its layers, and how many there are
    "flux/transformer": ("num_layers", 2),
    "flux/text_encoder": ("num_hidden_layers", 2),
    "flux/text_encoder_2": ("num_layers", 2),
    "qwen-image/transformer": ("num_layers", 2),
    "wan/transformer": ("num_layers", 2),
    "wan/image_encoder": ("num_hidden_layers", 3),
    "llama": ("num_hidden_layers", 3),
    "qwen3-5": ("num_hidden_layers", 6),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    tiny_images.save("flux-dev", root / "flux")
    tiny_images.save("qwen-image", root / "qwen-image")
    tiny_wan.save(next(kind for kind, of in tiny_wan.KINDS.items() if kind != "small" and of[2]), root / "wan")
    tiny_models.save("llama", root / "llama")
    for name, packed in (("qwen3-5", False), ("qwen3-next", True)):
        build("thirds", next=packed)[0].save_pretrained(root / name)
    return root


@contextlib.contextmanager
def little_memory():
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def refusal(source, config, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config).replace("Infinity", "1e999"))
    with little_memory(), pytest.raises(InputError) as error:
        plan_conversion(source, config=file)
    return str(error.value)


def config_of(source):
    return json.loads((source / "config.json").read_text())


@pytest.mark.parametrize("name", LAYERS)
def test_more_layers_than_tensors_are_counted_against_the_files(sources, tmp_path, name):
    field, there = LAYERS[name]
    config = config_of(sources / name)
    config.pop("layer_types", None)
    config |= {"full_attention_interval": 3} if name == "qwen3-5" else {}
    said = refusal(sources / name, config | {field: 3 * 10**8}, tmp_path)
    assert f"the file has layers 0 to {there - 1}, the config says 300000000: " in said


def test_layers_of_a_window_are_not_listed(sources, tmp_path):
    config = config_of(sources / "llama") | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 9, "num_hidden_layers": 10**9}
    assert "num_hidden_layers=1000000000 are more layers than the" in refusal(
        sources / "llama", config | window, tmp_path
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_experts": 4, "decoder_sparse_step": 1, "num_hidden_layers": 10**9}, "1000000000 of the 1000000000"),
        ({"layer_types": ["full_attention"], "num_hidden_layers": 10**9}, "no other pattern is supported"),
        ({"linear_num_key_heads": 10**9, "linear_num_value_heads": 10**9}, "more places than any"),
        ({"linear_num_key_heads": 999, "linear_num_value_heads": 1998}, "more places than any tensor has rows"),
        ({"head_dim": 10**400}, "beyond any size"),
    ],
)
def test_of_fused_projections(sources, tmp_path, changes, named):
    assert named in refusal(sources / "qwen3-next", config_of(sources / "qwen3-next") | changes, tmp_path)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("flux/vae", "layers_per_block", 10**9),
        ("flux/vae", "block_out_channels", [8] * 10**5),
        ("qwen-image/vae", "num_res_blocks", 10**9),
        ("qwen-image/vae", "dim_mult", [1] * 10**5),
    ],
)
def test_autoencoders_with_more_than_there_are_rules_for(sources, tmp_path, name, field, value):
    assert "supported" in refusal(sources / name, config_of(sources / name) | {field: value}, tmp_path)


def numbers(config, above=()):
    for name, value in config.items():
        if isinstance(value, dict):
            yield from numbers(value, (*above, name))
        elif type(value) in (int, float):
            yield (*above, name)


@pytest.mark.parametrize("name", ["flux/transformer", "flux/vae", "flux/text_encoder", "llama", "qwen3-5", "wan/vae"])
@pytest.mark.parametrize(
    "value", [10**9, 10**400, -1e308, 1e308, float("inf")], ids=("1e9", "1e400", "-1e308", "1e308", "inf")
)
def test_no_number_of_a_config_does_harm(sources, tmp_path, name, value):
    for *above, field in numbers(config_of(sources / name)):
        config = config_of(sources / name)
        inside = config
        for step in above:
            inside = inside[step]
        inside[field] = value
        file = tmp_path / "config.json"
        file.write_text(json.dumps(config).replace("Infinity", "1e999"))
        with little_memory(), contextlib.suppress(InputError):  # nothing else may be raised
            plan_conversion(sources / name, config=file)
