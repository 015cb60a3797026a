"""Folders of image pipelines as diffusers saves them: converted whole, verified, written back byte for byte."""

import functools
import json
import shutil

import pytest
import tiny_images
import tiny_models
from command_line import invoke

from shardzoo.checkpoints.pipeline import PARTIAL, open_pipeline
from shardzoo.convert import pipeline as pipelines
from shardzoo.convert.pipeline_source import KINDS, find_pipeline
from shardzoo.errors import InputError
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
    assert set(KINDS.values()) == set(kinds.MODULES) == set(kinds.FAMILIES)
    for name, families in FAMILIES.items():
        assert families.items() <= kinds.FAMILIES[KINDS[name]].items()
    for name in kinds.MODULES:
        module = kinds.find_kind(name)
        offered = [word for word in vars(kinds.Kind) if not word.startswith("_")]
        assert offered and all(callable(getattr(module, word)) for word in offered)


def changed(source, folder, **changes):
    """A copy of a pipeline's folder with another `model_index.json`."""
    shutil.copytree(source, folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | changes))
    return folder


def test_components_of_another_pipeline_are_refused_before_anything_is_written(saved, tmp_path):
    source = changed(saved("flux-dev"), tmp_path / "source")
    (source / "text_encoder").rename(source / "x")
    (source / "text_encoder_2").rename(source / "text_encoder")
    (source / "x").rename(source / "text_encoder_2")
    ended = invoke("convert", source, tmp_path / "dst")
    assert ended.status == 1 and not (tmp_path / "dst").exists()
    assert "text_encoder: is of family t5, and a flux pipeline needs clip-text" in ended.err
    assert "text_encoder_2: is of family clip-text, and a flux pipeline needs t5" in ended.err
    assert "vae" not in ended.err


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("QwenImagePipeline", ("text_encoder", "transformer", "vae")),
        ("Flux2Pipeline", ("text_encoder", "transformer")),
        ("WanPipeline", ("text_encoder", "transformer", "vae")),
    ],
)
def test_a_pipeline_that_says_to_be_of_another_kind_is_refused(saved, tmp_path, name, wrong):
    source = find_pipeline(changed(saved("flux-dev"), tmp_path / "source", _class_name=name))
    with pytest.raises(InputError) as error:
        pipelines.convert(source, tmp_path / "dst", sync=False)
    families = FAMILIES["FluxPipeline"]
    assert all(f"{one}: is of family {families[one]}, and a {KINDS[name]}" in str(error.value) for one in wrong)
    assert str(error.value).count("is of family") == len(wrong) and not (tmp_path / "dst").exists()


@pytest.mark.parametrize("noted", [b"", b"[]", b"{", b"\xff", b'{"vae": 3, "vae": 3}'])
def test_notes_of_a_run_that_are_damaged_are_named_and_can_be_started_over(saved, tmp_path, noted):
    source, dst = find_pipeline(saved("flux-dev")), tmp_path / "dst"
    dst.mkdir()
    (dst / PARTIAL).write_bytes(noted)
    with pytest.raises(InputError, match=rf"{PARTIAL}: .*pass --no-resume to start clean"):
        pipelines.convert(source, dst, components=("vae",), sync=False)
    assert (dst / PARTIAL).read_bytes() == noted and len(list(dst.iterdir())) == 1
    pipelines.convert(source, dst, components=("vae",), resume=False, sync=False)
    assert list(open_pipeline(dst).components) == ["vae"] and not (dst / PARTIAL).exists()


def test_what_is_converted_already_is_named(saved, tmp_path):
    pipelines.convert(find_pipeline(saved("flux-dev")), tmp_path / "dst", components=("vae",), sync=False)
    for path, what in ((tmp_path / "dst", "pipeline"), (tmp_path / "dst/vae", "checkpoint")):
        ended = invoke("convert", path, tmp_path / "again")
        assert ended.status == 1 and f"is a {what} of shardzoo already" in ended.err and "shardzoo export" in ended.err
    (tmp_path / "dst/pipeline.json").rename(tmp_path / "dst" / PARTIAL)
    assert "is a pipeline of shardzoo already" in invoke("convert", tmp_path / "dst", tmp_path / "again").err
