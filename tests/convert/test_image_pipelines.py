"""Folders of image pipelines as diffusers saves them: converted whole, verified, written back byte for byte."""

import functools
import json

import pytest
import tiny_images
import tiny_models

from shardzoo.checkpoints.pipeline import open_pipeline
from shardzoo.convert import pipeline as pipelines
from shardzoo.convert.pipeline_source import KINDS, find_pipeline
from shardzoo.zoo import pipelines as kinds

FAMILIES = {
    "FluxPipeline": {"text_encoder": "clip-text", "text_encoder_2": "t5", "transformer": "flux", "vae": "image-vae"},
    "Flux2Pipeline": {"text_encoder": "decoder", "transformer": "flux2", "vae": "image-vae"},
    "QwenImagePipeline": {"text_encoder": "decoder", "transformer": "qwen-image", "vae": "wan-vae"},
}
FAMILIES["Flux2KleinPipeline"] = FAMILIES["Flux2Pipeline"]
for _name in ("QwenImageEditPipeline", "QwenImageEditPlusPipeline"):
    FAMILIES[_name] = {**FAMILIES["QwenImagePipeline"], "image_encoder": "qwen2.5-vl-vision"}
QUICK = ("flux-dev", "flux2-dev", "qwen-image")


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Kind -> a diffusers folder."""
    return functools.cache(lambda kind: tiny_images.save(kind, tmp_path_factory.mktemp("saved") / kind))


def every():
    return [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in tiny_images.KINDS]


@pytest.mark.parametrize("kind", every())
def test_a_folder_comes_back_byte_for_byte(saved, tmp_path, kind):
    name, scheduler, *_, options = tiny_images.KINDS[kind]
    source = find_pipeline(saved(kind))
    report = pipelines.convert(source, tmp_path / "dst", sync=False)
    pipeline = open_pipeline(tmp_path / "dst")
    assert {n: one.family for n, one in pipeline.components.items()} == FAMILIES[name]
    assert pipeline.kind == report.kind == KINDS[name]
    assert options.items() <= pipeline.settings.items() and scheduler.items() <= pipeline.settings["scheduler"].items()
    pipelines.verify(pipeline, source)
    pipelines.verify(pipeline)
    pipelines.export(pipeline, tmp_path / "out")
    assert tiny_models.files(tmp_path / "out") == tiny_models.files(saved(kind))
    json.dumps(report.to_json())


def test_every_kind_that_is_converted_is_run():
    assert set(KINDS.values()) == set(kinds.MODULES)
    for name in kinds.MODULES:
        module = kinds.find_kind(name)
        offered = [word for word in vars(kinds.Kind) if not word.startswith("_")]
        assert offered and all(callable(getattr(module, word)) for word in offered)
