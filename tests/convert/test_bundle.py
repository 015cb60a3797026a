"""Single files of several models: each is converted alone, the others are named where none was chosen."""

import json
import math

import numpy as np
import pytest
import torch_flux
import torch_t5
from command_line import invoke
from hollow import write_hollow
from torch_values import arrays
from weight_files import loaded, same, write

from shardzoo import checkpoints
from shardzoo.convert import bundle
from shardzoo.convert.convert import convert, plan_conversion
from shardzoo.convert.export import export
from shardzoo.convert.families import rules_of
from shardzoo.convert.rules import expected
from shardzoo.convert.verify import verify
from shardzoo.errors import InputError
from shardzoo.zoo import clip_text, flux, image_vae, layout, t5

ENCODERS = "text_encoders."
# component -> (what its keys start with, family, layout, config)
PARTS = {
    "transformer": ("model.diffusion_model.", "flux", "original", flux.PRESETS["flux1-dev"]),
    "clip_l": (f"{ENCODERS}clip_l.transformer.", "clip-text", "transformers", clip_text.PRESETS["clip-l"]),
    "t5xxl": (f"{ENCODERS}t5xxl.transformer.", "t5", "transformers", t5.PRESETS["t5-v1.1-xxl"]),
    "vae": ("vae.", "image-vae", "original", image_vae.PRESETS["flux1-vae"]),
}


def published():
    """Keys and shapes of FLUX.1 dev as one file."""
    keys = {f"{ENCODERS}{name}.logit_scale": () for name in ("clip_l", "t5xxl")}
    for start, family, name, config in PARTS.values():
        rules = rules_of(family)
        kind = next(one for one in rules.layouts if one.name == name)
        wanted = expected(rules.rules_in(kind), layout.named(rules.declare(config)), kind.roots)
        keys |= {start + key: one.shape for key, one in wanted.items()}
    return keys


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_hollow(tmp_path_factory.mktemp("all"), published(), None)


@pytest.mark.parametrize("component", PARTS)
def test_each_model_of_a_published_list_is_matched_alone(folder, component):
    start, family, name, config = PARTS[component]
    plan = plan_conversion(folder, component=component)
    assert (plan.family, plan.layout, plan.config) == (family, name, config)
    assert not plan.carried and not plan.aliases
    own = {key for key in plan.tensors if key.startswith(start)}
    assert own == {*plan.tensors} - {*plan.skipped}
    taken = sum(math.prod(b - a for a, b in p.take) for leaf in plan.leaves.values() for p in leaf.pieces)
    assert taken == sum(math.prod(plan.tensors[key].shape) for key in own)


def test_without_a_choice_all_are_named(folder):
    with pytest.raises(InputError) as caught:
        plan_conversion(folder)
    lines = str(caught.value).splitlines()
    assert "holds several models" in lines[0] and "--component" in lines[0]
    for name, looks in {"transformer": "FLUX.1", "vae": "VAE", "clip_l": "CLIP", "t5xxl": "T5"}.items():
        assert any(f"{name}: " in line and looks in line for line in lines[1:])
    with pytest.raises(InputError, match="component='unet' is none of them"):
        plan_conversion(folder, component="unet")


@pytest.mark.parametrize(
    "keys, names",
    [
        (["model.diffusion_model.img_in.weight", "model.diffusion_model.txt_in.weight"], []),
        (["text_encoders.t5xxl.transformer.shared.weight"], []),
        (["text_encoders.t5xxl.transformer.shared.weight", "text_encoders.t5xxl.logit_scale"], ["t5xxl"]),
        (["text_encoders.clip_l.text_model.a", "text_encoders.clip_l.logit_scale"], []),
        (["first_stage_model.a", "cond_stage_model.b"], ["vae", "text_encoder"]),
        (["model.layers.0.a", "visual.b", "vae_scale"], []),
    ],
)
def test_what_such_a_file_is(keys, names):
    assert [*bundle.components(keys)] == names


def test_a_tiny_file_there_and_back(tmp_path):
    module, saved, config = torch_flux.build()
    encoder, t5_config = torch_t5.build("t5")
    named = {f"model.diffusion_model.{key}": value for key, value in arrays(module).items()}
    text = {f"{ENCODERS}t5xxl.transformer.{key}": value for key, value in arrays(encoder).items()}
    rest = {f"{ENCODERS}t5xxl.logit_scale": np.array(4.6), "first_stage_model.encoder.conv_in.bias": np.ones(3)}
    source = write(tmp_path / "all in one", {**named, **text, **rest})
    (source / "config.json").write_text(json.dumps({**saved, "_class_name": "FluxTransformer2DModel"}))
    for component, own, wanted in (("transformer", named, config), ("t5xxl", text, t5_config)):
        place, out = tmp_path / component, tmp_path / f"{component}-out"
        report = convert(source, place, component=component, sync=False)
        assert checkpoints.open(place).config == wanted and report.tensors == len(own)
        verify(place, source)
        export(place, out)
        same(loaded(out), own)
        assert (out / "config.json").exists() == (component == "transformer")


def test_command(tmp_path, folder):
    done = invoke("convert", folder, tmp_path / "out", "--dry-run")
    assert done.status == 1 and "choose one" in done.err
    done = invoke("convert", folder, tmp_path / "out", "--dry-run", "--component", "vae")
    assert done.status == 0 and "image-vae" in done.out, done.err
