"""Images from the command line: tiny pipelines as diffusers saves them, converted and run, to files and folders."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import PIL.Image
import pytest
import tiny_images
import torch
from command_line import invoke, run

from shardzoo import checkpoints
from shardzoo.checkpoints.manifest import FileEntry, sha256
from shardzoo.checkpoints.pipeline import Pipeline, open_pipeline
from shardzoo.cli import diffusion, media
from shardzoo.cli.tokenizers import read_tokenizer
from shardzoo.errors import InputError
from shardzoo.zoo.mesh import make_mesh

SIZE = ("--height", 16, "--width", 24, "--steps", 2)
PROMPT = "a red   fox & the ox"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Kind -> the pipeline of diffusers, and our folder."""

    @functools.cache
    def of(kind):
        folder = tmp_path_factory.mktemp(kind)
        theirs = tiny_images.pipeline(kind)
        theirs.save_pretrained(folder / "source")
        ended = invoke("convert", folder / "source", folder / "ours")
        assert ended.status == 0, ended.err
        return theirs, folder / "ours"

    return of


def packed(theirs, noise):
    given = torch.from_numpy(np.array(noise))
    if hasattr(theirs, "_patchify_latents"):
        return theirs._patchify_latents(given)
    return theirs._pack_latents(given, *noise.shape)


CASES = {
    "flux-dev": (["--guidance", 2], {"guidance_scale": 2.0}),
    "flux-schnell": ([], {"max_sequence_length": 256}),
    "flux2-klein": (["--image", "one.png", "--image", "two.png"], {}),
    "qwen-image": (["--negative", "blurry"], {"negative_prompt": "blurry", "true_cfg_scale": 4.0}),
}
SLOW = ("flux-schnell", "qwen-image")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow) if k in SLOW else k for k in CASES])
def test_an_image_is_that_of_diffusers_from_the_same_noise(folders, tmp_path, monkeypatch, kind):
    theirs, ours = folders(kind)
    words, options = CASES[kind]
    monkeypatch.chdir(tmp_path)
    if "--image" in words:
        pictures = [PIL.Image.fromarray(np.full((64, 80, 3), shade, np.uint8)) for shade in (40, 200)]
        for picture, name in zip(pictures, ("one.png", "two.png"), strict=True):
            picture.save(name)
        options = options | {"image": pictures}
    monkeypatch.setattr(diffusion, "start_mesh", lambda _: make_mesh(devices=jax.devices()[:1]))
    real, drawn = jax.random.normal, []
    monkeypatch.setattr(jax.random, "normal", lambda *given: drawn.append(real(*given)) or drawn[-1])
    ended = invoke("generate", ours, "--prompt", PROMPT, *SIZE, *words, "--seed", 4, "--out", "it.png", "--json")
    assert ended.status == 0, ended.err
    said = json.loads(ended.out)
    assert (said["frames"], said["height"], said["width"], said["out"]) == (1, 16, 24, "it.png")
    latents = packed(theirs, drawn[0])
    expected = theirs(
        prompt=PROMPT, height=16, width=24, num_inference_steps=2, latents=latents, output_type="np", **options
    ).images[0]
    found = np.asarray(PIL.Image.open("it.png"))
    assert found.shape == expected.shape and np.abs(found - expected * 255).max() < 0.55


@pytest.mark.slow
def test_a_batch_goes_to_a_folder_as_a_user_has_it(folders, tmp_path):
    """In a process of its own, in 16 bits, on devices that the command makes, with blocks in host memory."""
    _, ours = folders("flux-schnell")
    words = ("generate", ours, "--prompt", "a fox", "--prompt", "an ox", *SIZE, "--dtype", "bf16")
    ended = run(*words, "--mesh", "tensor=2", "--offload", "--out", tmp_path / "out")
    assert ended.status == 0 and ended.err == "", ended.err
    assert f"{tmp_path / 'out'}: 2 images of 16 x 24" in ended.out
    images = [np.asarray(PIL.Image.open(path)) for path in sorted((tmp_path / "out").iterdir())]
    assert len(images) == 2 and images[0].shape == (16, 24, 3) and (images[0] != images[1]).any()
    again = invoke(*words, "--out", tmp_path / "out")
    assert again.status == 1 and "exists already: pass --overwrite" in again.err


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "words"), [("flux2-klein", ("--mesh", "tensor=2")), ("qwen-image", ("--offload",))])
def test_weights_in_eight_bits_make_about_the_same_image(folders, tmp_path, kind, words):
    _, ours = folders(kind)
    images = []
    for number, more in enumerate([(), ("--quantize", "int8", *words)]):
        out = tmp_path / f"{number}.png"
        ended = invoke("generate", ours, "--prompt", PROMPT, *SIZE, "--out", out, *more)
        assert ended.status == 0, ended.err
        images.append(np.asarray(PIL.Image.open(out)).astype(int))
    difference = np.abs(images[0] - images[1])
    assert 0 < difference.mean() < 8 < images[0].std()


@pytest.mark.parametrize(
    ("kind", "words", "named"),
    [
        ("flux-dev", ("--height", 17), ("height=17 is not a multiple of 4: use 16 or 20",)),
        ("flux-dev", ("--width", 10**9), ("use at most 16384",)),
        ("flux-dev", ("--frames", 5), ("frames: this model does not take it",)),
        ("flux-dev", ("--fps", 5), ("makes images, which --fps is not for",)),
        ("flux-dev", ("--image", "one.png"), ("image: this model does not take it",)),
        ("flux-dev", ("--negative", "x"), ("negative and true_guidance go together",)),
        ("flux-dev", ("--guidance", "nan"), ("guidance=nan is not a number to scale by",)),
        ("flux-dev", ("--guidance", 1, "--guidance", 2), ("2 scales for one transformer",)),
        ("flux-dev", ("--mesh", "tensor=8"), ("text_encoder: ", "heads=4 does not divide by 8", "transformer: ")),
        ("flux-dev", ("--out", "it.mp4"), ("neither a .png file",)),
        ("flux-dev", ("--prompt", "another"), ("it.png: is one file for 2 images: give the name of a folder",)),
        ("flux-dev", ("--top-k", 4), ("--top-k would be for the other kind",)),
        ("flux2-klein", ("--guidance", 2), ("guidance: this model does not take it",)),
        ("flux2-klein", ("--image", "small.png"), ("with a side below 64 pixels",)),
        ("flux2-klein", ("--image", "long.png"), ("more than 8 times as long as wide",)),
    ],
)
def test_what_cannot_be_is_refused_before_a_weight_is_read(folders, tmp_path, monkeypatch, kind, words, named):
    _, ours = folders(kind)
    monkeypatch.chdir(tmp_path)
    for name, size in {"one": (64, 64), "small": (63, 64), "long": (64, 513)}.items():
        PIL.Image.fromarray(np.zeros((*size, 3), np.uint8)).save(f"{name}.png")
    monkeypatch.setattr(checkpoints, "restore", None)
    ended = invoke("generate", ours, "--prompt", PROMPT, *SIZE, "--out", "it.png", *words)
    assert ended.status == 1 and ended.out == "", ended
    for part in named:
        assert part in ended.err
    assert len(list(tmp_path.iterdir())) == 3


def test_a_pipeline_of_components_that_do_not_belong_there_is_refused(folders, tmp_path, monkeypatch):
    """As converters that did not look at families have left them."""
    _, ours = folders("flux-dev")
    pipeline = open_pipeline(ours)
    swapped = shutil.copytree(ours, tmp_path / "swapped")
    (swapped / "text_encoder").rename(swapped / "x")
    (swapped / "text_encoder_2").rename(swapped / "text_encoder")
    (swapped / "x").rename(swapped / "text_encoder_2")
    one, two = (pipeline.components[name] for name in ("text_encoder", "text_encoder_2"))
    components = {**pipeline.components, "text_encoder": two, "text_encoder_2": one}
    dataclasses.replace(pipeline, path=swapped, components=components).write()
    other = shutil.copytree(ours, tmp_path / "other")
    settings = {**pipeline.settings, "_class_name": "QwenImagePipeline"}
    dataclasses.replace(pipeline, path=other, kind="qwen-image", settings=settings).write()
    monkeypatch.setattr(checkpoints, "restore", None)
    for folder, names in (
        (swapped, ("text_encoder", "text_encoder_2")),
        (other, ("text_encoder", "transformer", "vae")),
    ):
        generate = ("generate", folder, "--prompt", PROMPT, *SIZE, "--out", tmp_path / "it.png")
        for ended in (invoke(*generate), invoke("audit", folder, "--mesh", "one")):
            assert ended.status == 1 and "its components are not of one pipeline" in ended.err, ended.err
            assert all(f"{name}: is of family" in ended.err for name in names)
            assert ended.err.count("is of family") == len(names)


TEXTS = ("a red fox & the   ox", "THE OX's <|endoftext|>", "naïve  日本\n\n 42 boxes<|im_end|> the", "")


@pytest.mark.parametrize(("kind", "name"), [("flux-dev", "tokenizer"), ("flux2-klein", "tokenizer")])
def test_a_tokenizer_of_vocabulary_and_merges_is_that_of_transformers(folders, tmp_path, kind, name):
    """As FLUX.1's of CLIP and Qwen-Image's are published, without tokenizer.json."""
    theirs, ours = folders(kind)
    pipeline = open_pipeline(ours)
    whole, tokenizer = read_tokenizer(pipeline, name), getattr(theirs, name)
    described = json.loads(pipeline.read(f"{name}/tokenizer.json"))
    merges = "".join(f"{' '.join(pair)}\n" for pair in described["model"]["merges"])
    added = {token["id"]: {k: v for k, v in token.items() if k != "id"} for token in described["added_tokens"]}
    settings = json.loads(pipeline.read(f"{name}/tokenizer_config.json")) | {"added_tokens_decoder": added}
    source = tmp_path / "source"
    (source / name).mkdir(parents=True)
    (source / name / "vocab.json").write_text(json.dumps(described["model"]["vocab"]))
    (source / name / "merges.txt").write_text("#version: 0.2\n" + merges)
    (source / name / "tokenizer_config.json").write_text(json.dumps(settings))
    again = type(tokenizer).from_pretrained(source / name)
    bare = read_tokenizer(_carrying(source, tmp_path / "ours", name), name)
    for text in TEXTS:
        wanted = tokenizer(text, truncation=True, max_length=9).input_ids
        assert whole.encode(text, limit=9) == bare.encode(text, limit=9) == wanted, text
        assert again(text, truncation=True, max_length=9).input_ids == wanted, text
    assert whole.padding() == bare.padding() == (tokenizer.pad_token_id, False)
    settings["tokenizer_class"] = "XTokenizer"
    (source / name / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=r"'XTokenizer' only tokenizer\.json is read"):
        read_tokenizer(_carrying(source, tmp_path / "other", name), name)


def _carrying(source, folder, name):
    """A pipeline of no components with the small files of a source."""
    shutil.copytree(source, folder / "files")
    files = {
        f"{name}/{path.name}": FileEntry(size=path.stat().st_size, sha256=sha256(path.read_bytes()))
        for path in (source / name).iterdir()
    }
    return Pipeline(path=folder, kind="flux", layout="diffusers", components={}, files=files, settings={})


def test_the_tokenizer_of_another_encoder_does_not_stand_in_for_one_that_is_missing(folders, tmp_path):
    _, ours = folders("flux-dev")
    pipeline = open_pipeline(ours)
    files = {name: entry for name, entry in pipeline.files.items() if not name.startswith("tokenizer/")}
    with pytest.raises(InputError, match=r"no tokenizer .* in a folder 'tokenizer' among its files"):
        read_tokenizer(dataclasses.replace(pipeline, files=files), "tokenizer")


def test_outputs_that_could_not_be_put_in_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="has no name of its own"):
        media.check_output(Path("."), overwrite=True, video=False, count=1)
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    with pytest.raises(InputError, match="exists already: remove it"):
        media.check_output(Path("link"), overwrite=True, video=False, count=1)


def test_one_picture_is_written_whole_or_not_at_all(tmp_path):
    frame = np.random.default_rng(0).integers(0, 256, (1, 8, 9, 3)).astype(np.uint8)
    assert media.write_frames(tmp_path / "a.png", iter([frame]), None) == 1
    np.testing.assert_array_equal(np.asarray(PIL.Image.open(tmp_path / "a.png")), frame[0])

    def fails():
        yield frame
        raise MemoryError

    with pytest.raises(MemoryError):
        media.write_frames(tmp_path / "a.png", fails(), None)
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"]
