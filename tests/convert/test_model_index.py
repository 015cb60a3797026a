"""`model_index.json`: names and entries that are not as they should be are refused before anything is written."""

import json

import pytest
from command_line import invoke

from shardzoo.convert.pipeline_source import find_pipeline
from shardzoo.errors import InputError

INDEX = {
    "_class_name": "FluxPipeline",
    "_diffusers_version": "0.42.1",
    "image_encoder": [None, None],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
    "is_distilled": True,
}


@pytest.fixture
def folder(tmp_path):
    """Makes a pipeline's folder whose index differs by what is given; files of weights are empty."""

    def make(**changes):
        root = tmp_path / "source"
        for name in ("scheduler/scheduler_config.json", "tokenizer/tokenizer.json"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text("{}")
        for name in ("transformer", "vae"):
            (root / name).mkdir(exist_ok=True)
            (root / name / "diffusion_pytorch_model.safetensors").touch()
        (root / "model_index.json").write_text(json.dumps(INDEX | changes))
        return root

    return make


def test_components_small_files_and_options_are_told_apart(folder):
    source = find_pipeline(folder())
    assert dict(source.components) == {"transformer": "transformer", "vae": "vae"} and not source.notes
    assert source.files == ("model_index.json", "scheduler/scheduler_config.json", "tokenizer/tokenizer.json")
    assert source.settings == {"_class_name": "FluxPipeline", "is_distilled": True, "scheduler": {}}


@pytest.mark.parametrize(
    "name",
    [
        *("../victim", "/etc", "..", ".", "", "a/b", "a\\b", "a/../b", "vae/", "x\0y", "x\ny", ".hidden", "\ud800"),
        *("pipeline.json", "pipeline.partial.json", "files", "x" * 201),
    ],
)
def test_names_that_are_no_folders_in_the_pipelines_are_refused(folder, tmp_path, name):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim/secret.txt").write_text("secret")
    for entry in (["a", "Tokenizer"], ["diffusers", "Model"], [None, None]):
        root = folder(**{name: entry})
        with pytest.raises(InputError) as error:
            find_pipeline(root)
        assert f"{name!r}: is not the name of a folder" in str(error.value)
        assert str(root / "model_index.json") in str(error.value)
    ended = invoke("convert", root, tmp_path / "out/dst")
    assert ended.status == 1 and "is not the name of a folder" in ended.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "victim"]


@pytest.mark.parametrize(
    "entry", ["x", [], {}, 3, True, None, ["diffusers"], ["diffusers", None], [None], [1, 2], ["", ""]]
)
def test_an_entry_that_names_no_class_is_refused_where_a_folder_holds_weights(folder, entry):
    with pytest.raises(InputError, match=r"model_index.json.*'transformer': .* is not \[library, class\]"):
        find_pipeline(folder(transformer=entry))


def test_all_entries_are_named_at_once(folder):
    with pytest.raises(InputError) as error:
        find_pipeline(folder(**{"transformer": "x", "vae": [], "../a": ["b", "C"], "unet": ["diffusers"]}))
    assert [word for word in ("'transformer'", "'vae'", "'../a'", "'unet'") if word not in str(error.value)] == []


@pytest.mark.parametrize("named", [["FluxPipeline"], {}, None, 3, "UnheardPipeline"])
def test_a_class_that_is_not_converted_is_named(folder, named):
    with pytest.raises(InputError) as error:
        find_pipeline(folder(_class_name=named))
    assert f"model_index.json is of {named!r}" in str(error.value) and "FluxPipeline, Flux2Pipeline" in str(error.value)


def test_weights_that_are_not_converted_are_noted(folder):
    root = folder(vae=[None, None])
    (root / "other").mkdir()
    (root / "other/model.safetensors").touch()
    source = find_pipeline(root)
    assert list(source.components) == ["transformer"]
    other, vae = source.notes
    assert other == "other: holds weights and was not converted: model_index.json does not name it"
    assert vae == "vae: holds weights and was not converted: model_index.json leaves it out by [null, null]"


@pytest.mark.parametrize("name", ["a\\b.json", "a\nb.json", b"\xff.json".decode(errors="surrogateescape")])
def test_small_files_whose_names_are_not_plain_are_refused(folder, name):
    root = folder()
    (root / "tokenizer" / name).touch()
    with pytest.raises(InputError, match="is not the plain name of a file: rename it"):
        find_pipeline(root)


def test_files_of_the_wan_repositories_have_plain_names(tmp_path):
    for name in ("diffusion_pytorch_model.safetensors", "models_t5\\..\\x.pth"):
        (tmp_path / name).touch()
    with pytest.raises(InputError, match=r"models_t5.* is not the plain name of a file"):
        find_pipeline(tmp_path)
