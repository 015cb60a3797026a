"""Videos from the command line: a tiny pipeline as diffusers saves it, converted and run, to a file and to pictures."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import PIL.Image
import pytest
import tiny_wan
import torch
from command_line import invoke, run

from shardzoo import checkpoints
from shardzoo.checkpoints.manifest import FileEntry, sha256
from shardzoo.checkpoints.pipeline import open_pipeline
from shardzoo.cli import diffusion, media
from shardzoo.cli.tokenizers import read_tokenizer
from shardzoo.zoo import wan_pipeline
from shardzoo.zoo.mesh import make_mesh

SIZE = ("--height", 32, "--width", 48, "--frames", 5, "--steps", 2)
PROMPT = ("--prompt", "a red   fox &amp; dog", "--negative", "blurry")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Kind -> diffusers folder and ours."""
    made = {}

    def of(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            source = tiny_wan.save(kind, folder / "source")
            ended = invoke("convert", source, folder / "ours")
            assert ended.status == 0, ended.err
            made[kind] = source, folder / "ours"
        return made[kind]

    return of


def pictures(folder):
    return np.stack([np.asarray(PIL.Image.open(path)) for path in sorted(folder.iterdir())])


@pytest.mark.parametrize(
    "kind", ["t2v", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("i2v", "flf2v", "i2v-a14b"))]
)
def test_pictures_are_those_of_diffusers_from_the_same_noise(folders, tmp_path, monkeypatch, kind):
    source, ours = folders(kind)
    given = pictures_for(kind, tmp_path)
    monkeypatch.setattr(diffusion, "start_mesh", lambda _: make_mesh(devices=jax.devices()[:1]))
    real, drawn = jax.random.normal, []
    monkeypatch.setattr(jax.random, "normal", lambda *given: drawn.append(real(*given)) or drawn[-1])
    words = [word for name, path in given.items() for word in (f"--{name}", path)]
    words += ["--guidance", 3, "--seed", 4, "--out", tmp_path / "out", "--json"]
    ended = invoke("generate", ours, *PROMPT, *SIZE, *words)
    assert ended.status == 0, ended.err
    said = json.loads(ended.out)
    assert (said["frames"], said["height"], said["width"]) == (5, 32, 48)
    theirs = tiny_wan.diffusers.DiffusionPipeline.from_pretrained(source)
    theirs.set_progress_bar_config(disable=True)
    expected = theirs(
        prompt=PROMPT[1],
        negative_prompt=PROMPT[3],
        height=32,
        width=48,
        num_frames=5,
        num_inference_steps=2,
        guidance_scale=3.0,
        latents=torch.from_numpy(np.array(drawn[0])),
        **{name.replace("-", "_"): PIL.Image.open(path) for name, path in given.items()},
    ).frames[0]
    found = pictures(tmp_path / "out")
    assert found.shape == expected.shape and np.abs(found - expected * 255).max() < 0.55


def pictures_for(kind, folder):
    """Files for the options of a kind that takes pictures."""
    names = {"i2v": ["image"], "i2v-a14b": ["image"], "flf2v": ["image", "last-image"]}.get(kind, [])
    rng = np.random.default_rng(0)
    for name in names:
        PIL.Image.fromarray(rng.integers(0, 256, (32, 48, 3)).astype(np.uint8)).save(folder / f"{name}.png")
    return {name: folder / f"{name}.png" for name in names}


def test_pictures_are_scaled_and_cut_to_the_size(tmp_path):
    wide = np.zeros((20, 60, 3), np.uint8)
    wide[:, 15:45] = (200, 100, 50)
    PIL.Image.fromarray(wide).save(tmp_path / "wide.png")
    found = media.read_picture(tmp_path / "wide.png").covering(40, 40)
    assert found.shape == (40, 40, 3) and np.abs(found.astype(int) - (200, 100, 50)).max() <= 1
    PIL.Image.fromarray(wide[:, :, 0]).save(tmp_path / "grey.png")
    same = media.read_picture(tmp_path / "grey.png").covering(20, 60)
    np.testing.assert_array_equal(same, np.repeat(wide[:, :, :1], 3, axis=2))


def test_a_film_is_written_as_a_user_has_it(folders, tmp_path):
    """In a process of its own, in 16 bits, on devices that the command makes."""
    import imageio_ffmpeg

    _, ours = folders("t2v")
    out = tmp_path / "film.mp4"
    words = ("generate", ours, *PROMPT, *SIZE, "--dtype", "bf16", "--mesh", "context=2", "--fps", 20)
    ended = run(*words, "--out", out)
    assert ended.status == 0 and ended.err == "", ended.err
    assert f"{out}: 5 frames of 32 x 48" in ended.out
    frames, seconds = imageio_ffmpeg.count_frames_and_secs(str(out))
    assert frames == 5 and seconds == pytest.approx(5 / 20, abs=0.02)
    assert [path.name for path in tmp_path.iterdir()] == ["film.mp4"]
    again = invoke(*words, "--out", out)
    assert again.status == 1 and "exists already: pass --overwrite" in again.err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--height", 33), ("height=33 is not a multiple of 16: use 32 or 48",)),
        (("--width", 5, "--frames", 8), ("width=5 is not a multiple of 16: use 16 or 32", "use 5 or 9")),
        (("--image", "first.png"), ("makes videos of text alone",)),
        (("--image", "none.png"), ("none.png: cannot be read as a picture",)),
        (("--guidance", 3, "--guidance", 4), ("2 scales for 1 transformers",)),
        (("--mesh", "tensor=8"), ("text_encoder: ", "heads=4 does not divide by 8", "transformer: ")),
        (("--shift", 0), ("shift=0.0 is not above 0",)),
        (("--shift", "inf"), ("shift=inf is not above 0 and finite",)),
        (("--guidance", 1, "--negative", "word3"), ("negative does nothing at guidance=1: give a scale above 1",)),
        (("--guidance", "nan"), ("guidance=nan is not a number to scale by",)),
        (("--height", -16, "--image", "first.png"), ("height=-16 is not a multiple of 16: use 16 or 32",)),
        (("--width", 10**9, "--image", "first.png"), ("use at most 16384",)),
        (("--frames", 4 * 10**9 + 1), ("use at most 4093",)),
        (("--negative", "a\udcff"), ("--negative is not UTF-8",)),
        (("--out", "/proc/clip.mp4"), ("/proc/clip.mp4: cannot be written",)),
        (("--dtype", "float8_e4m3fn"), ("is for storage",)),
        (("--prompt", "another"), ("2 prompts were given",)),
        (("--temperature", 0.5, "--raw"), ("--raw, --temperature would be for the other kind",)),
        (("--out", "clip.avi"), ("neither a .mp4 file",)),
        (("--out", "none/clip.mp4"), ("there is no folder none",)),
    ],
)
def test_what_cannot_be_is_refused_before_a_weight_is_read(folders, tmp_path, monkeypatch, words, named):
    _, ours = folders("t2v")
    monkeypatch.chdir(tmp_path)
    PIL.Image.fromarray(np.zeros((32, 48, 3), np.uint8)).save("first.png")
    monkeypatch.setattr(checkpoints, "restore", None)
    ended = invoke("generate", ours, *PROMPT, *SIZE, "--out", "out", *words)
    assert ended.status == 1 and ended.out == "", ended
    for part in named:
        assert part in ended.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first.png"]


def test_missing_parts_are_named(folders, tmp_path):
    source, ours = folders("t2v")
    ended = invoke("generate", tmp_path / "none", *PROMPT, "--out", "x.mp4")
    assert ended.status == 1 and "there is no such folder" in ended.err
    ended = invoke("generate", ours, *PROMPT)
    assert ended.status == 1 and "--out FILE.mp4" in ended.err
    ended = invoke("generate", ours / "transformer", *PROMPT, "--out", "x.mp4")
    assert ended.status == 1 and "--negative, --out would be for the other kind" in ended.err
    ended = invoke("generate", ours / "transformer", "--prompt", "a")
    assert ended.status == 1 and "runs language models" in ended.err
    assert invoke("convert", source, tmp_path / "part", "--component", "transformer").status == 0
    ended = invoke("generate", tmp_path / "part", *PROMPT, *SIZE, "--out", tmp_path / "x")
    assert ended.status == 1 and "no 'text_encoder', 'vae'" in ended.err
    bare = shutil.copytree(ours, tmp_path / "bare")
    made = open_pipeline(bare)
    without = {name: entry for name, entry in made.files.items() if "tokenizer" not in name}
    dataclasses.replace(made, files=without).write()
    ended = invoke("generate", bare, *PROMPT, *SIZE, "--out", tmp_path / "x")
    assert ended.status == 1 and "no tokenizer (tokenizer.json" in ended.err
    for text, named in (("{}", "has no model"), ("{", "not as it was"), ('{"model": {}}', "cannot be used")):
        file = next(name for name in made.files if name.endswith("tokenizer.json"))
        made.file(file).write_text(text)
        entry = FileEntry(size=len(text), sha256=sha256(text.encode()))
        dataclasses.replace(made, files=made.files | ({} if text == "{" else {file: entry})).write()
        ended = invoke("generate", bare, *PROMPT, *SIZE, "--out", tmp_path / "x")
        assert ended.status == 1 and named in ended.err
    odd = {"use_karras_sigmas": True, "prediction_type": "epsilon", "flow_shift": "abc", "solver_order": 7}
    dataclasses.replace(made, settings={**made.settings, "scheduler": made.settings["scheduler"] | odd}).write()
    ended = invoke("generate", bare, *PROMPT, *SIZE, "--out", tmp_path / "x")
    assert "use_karras_sigmas=True is not" in ended.err and "prediction_type='epsilon' is not" in ended.err
    assert "flow_shift='abc' is not" in ended.err and "solver_order=7 is not" in ended.err


def test_numbers_that_no_machine_has_are_refused(folders, tmp_path):
    _, ours = folders("t2v")
    ended = invoke("generate", ours, *PROMPT, *SIZE, "--out", tmp_path / "x", "--seed", 2**32)
    assert ended.status == 2 and "--seed" in ended.err
    ended = run("generate", ours, *PROMPT, *SIZE, "--out", tmp_path / "x", "--mesh", "data=100000")
    assert ended.status == 1 and "needs 100000 devices" in ended.err, ended.err


def test_prompts_are_cut_and_tidied_as_the_source_does(folders):
    source, ours = folders("t2v")
    theirs = tiny_wan.transformers.AutoTokenizer.from_pretrained(source / "tokenizer")
    tokenizer = read_tokenizer(open_pipeline(ours), "tokenizer")
    for text in ("a red fox", "", "nobody " * 700, "dog &lt; fox\n jumps"):
        cleaned = wan_pipeline.clean(text)
        expected = theirs(cleaned, max_length=512, truncation=True, add_special_tokens=True).input_ids
        assert tokenizer.encode(cleaned, limit=512) == expected
    assert wan_pipeline.clean(" a &amp;amp; \n b ") == "a & b"


def test_frames_that_fail_leave_nothing(tmp_path):
    def frames():
        yield np.zeros((2, 32, 48, 3), np.uint8)
        raise MemoryError

    for name in ("film.mp4", "pictures"):
        with pytest.raises(MemoryError):
            media.write_frames(tmp_path / name, frames(), 16)
    assert not list(tmp_path.iterdir())
