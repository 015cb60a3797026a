"""What the pipelines of the published models of images take and refuse, and their steps, before any weight is there."""

import dataclasses

import diffusers
import jax
import numpy as np
import PIL.Image
import pytest
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift, retrieve_timesteps
from jax import P

from shardzoo.errors import InputError
from shardzoo.zoo import clip_text, decoder, flux, flux2, image_pipeline, image_vae, qwen2_5_vl, qwen_image, t5, wan_vae
from shardzoo.zoo.image_pipeline import Text
from shardzoo.zoo.mesh import make_mesh
from shardzoo.zoo.pipelines import Wanted, find_kind, refuse_idle_negative

DYNAMIC = {"use_dynamic_shifting": True, "shift": 3.0}
QWEN = {**DYNAMIC, "shift": 1.0, "shift_terminal": 0.02, "max_image_seq_len": 8192, "max_shift": 0.9}
DECODERS = {"flux2-dev": "mistral-small-3.2-24b", "flux2-klein-4b": "qwen3-4b", "flux2-klein-9b": "qwen3-8b"}
# name -> (kind, what its config files say besides the scheduler, the scheduler's config)
FOR = {
    "flux1-dev": ("flux", {"_class_name": "FluxPipeline"}, DYNAMIC),
    "flux1-schnell": ("flux", {"_class_name": "FluxPipeline"}, {"shift": 1.0}),
    "flux2-dev": ("flux2", {"_class_name": "Flux2Pipeline"}, DYNAMIC),
    "flux2-klein-4b": ("flux2", {"_class_name": "Flux2KleinPipeline", "is_distilled": True}, DYNAMIC),
    "flux2-klein-9b": ("flux2", {"_class_name": "Flux2KleinPipeline", "is_distilled": False}, DYNAMIC),
    "qwen-image": ("qwen-image", {"_class_name": "QwenImagePipeline"}, QWEN),
    "qwen-image-edit": ("qwen-image", {"_class_name": "QwenImageEditPlusPipeline"}, QWEN),
}


def declared(name):
    kind = FOR[name][0]
    if kind == "flux":
        return {
            "text_encoder": clip_text.declare(clip_text.PRESETS["clip-l"]),
            "text_encoder_2": t5.declare(t5.PRESETS["t5-v1.1-xxl"]),
            "transformer": flux.declare(flux.PRESETS[name]),
            "vae": image_vae.declare(image_vae.PRESETS["flux1-vae"]),
        }
    if kind == "flux2":
        return {
            "text_encoder": decoder.declare(decoder.PRESETS[DECODERS[name]]),
            "transformer": flux2.declare(flux2.PRESETS[name]),
            "vae": image_vae.declare(image_vae.PRESETS["flux2-vae"]),
        }
    eyes = {"image_encoder": qwen2_5_vl.declare(qwen2_5_vl.Config())} if "edit" in name else {}
    return eyes | {
        "text_encoder": decoder.declare(decoder.PRESETS["qwen2.5-7b"]),
        "transformer": qwen_image.declare(qwen_image.PRESETS["qwen-image"]),
        "vae": wan_vae.declare(wan_vae.PRESETS["wan2.1-vae"]),
    }


def settings(name):
    kind, said, scheduler = FOR[name]
    scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler", **scheduler}
    return find_kind(kind).read_settings({**said, "scheduler": scheduler}, "diffusers")


def text(rows=2, seq=80):
    return Text(np.ones((rows, seq), np.int32), np.ones((rows, seq), bool))


def request(name, **more):
    parts, found = declared(name), settings(name)
    names = [n for n in parts if n.startswith("text_encoder")]
    made = {"texts": {n: text() for n in names}}
    transformer = parts["transformer"].config
    made["told"] = 3.5 if getattr(transformer, "guidance", False) else None
    if FOR[name][0] == "qwen-image" or name == "flux2-klein-9b":
        made |= {"negative": {n: text() for n in names}, "scale": 4.0}
    if "edit" in name:
        made |= {"references": (np.zeros((512, 1024, 3), np.uint8),), "seen": (np.zeros((96, 192, 3), np.uint8),)}
    return find_kind(FOR[name][0]).Request(**{**made, **more}), parts, found


def refusal(name, **more):
    made, parts, found = request(name, **more)
    with pytest.raises(InputError) as error:
        find_kind(FOR[name][0]).check(parts, found, made)
    return str(error.value)


@pytest.mark.parametrize("name", FOR)
def test_published_sizes_are_taken(name):
    made, parts, found = request(name, height=1024, width=768)
    kind = find_kind(FOR[name][0])
    kind.check(parts, found, made)
    shape = kind.latent_shape(parts["vae"].config, made)
    assert shape == (2, 32 if "flux2" in name else 16, 128, 96)
    assert image_pipeline.grids(shape, made)[0] == (64, 48)
    assert image_pipeline.grids(shape, made)[1:] == (((32, 64),) if "edit" in name else ())
    for component in parts:
        rest = {key: value for key, value in parts.items() if key != component}
        assert kind.needed(rest, found) == [component]
    assert kind.frame_rate(found) is None


@pytest.mark.parametrize("steps", [1, 4, 28, 50])
@pytest.mark.parametrize("size", [(256, 256), (1024, 1024), (768, 1360), (2048, 2048)])
@pytest.mark.parametrize("name", FOR)
def test_steps_are_those_of_the_pipelines_of_diffusers(name, size, steps):
    tokens = size[0] // 16 * (size[1] // 16)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**FOR[name][2])
    c = scheduler.config
    line = (c.base_image_seq_len, c.max_image_seq_len, c.base_shift, c.max_shift)
    mu = compute_empirical_mu(tokens, steps) if "flux2" in name else calculate_shift(tokens, *line)
    times, _ = retrieve_timesteps(scheduler, steps, sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    sampler = settings(name).sampler(tokens, steps)
    if steps == 1 and c.shift_terminal:
        assert np.isnan(times.numpy()).all() and sampler.levels.tolist() == [1, 0]
        return
    np.testing.assert_array_equal(sampler.timesteps, times.numpy())
    np.testing.assert_array_equal(sampler.levels, scheduler.sigmas.numpy())


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        (
            "flux1-dev",
            {"height": 1000, "width": 0},
            ["height=1000 is not a multiple of 16: use 992 or 1008", "width=0"],
        ),
        ("flux1-dev", {"steps": 0, "told": None}, ["steps=0 is not at least 1", "guidance: missing"]),
        ("flux1-dev", {"told": -3.5, "scale": -1.0}, ["guidance=-3.5 is not a number", "guidance=-1.0 is not"]),
        (
            "flux1-dev",
            {"texts": {"text_encoder": text(0), "text_encoder_2": text(0)}},
            ["prompt: there is none for text_encoder: give one", "there is none for text_encoder_2"],
        ),
        ("flux1-schnell", {"told": 3.5}, ["this model is not told it"]),
        ("flux1-schnell", {"references": (np.zeros((16, 16, 3), np.uint8),)}, ["makes images of text alone"]),
        (
            "flux1-dev",
            {"texts": {"text_encoder": text(), "text_encoder_2": text(3)}},
            ["3 texts of text_encoder_2 for 2"],
        ),
        ("flux2-dev", {"negative": {"text_encoder": text()}, "scale": 2.0}, ["is not guided away from one"]),
        ("flux2-dev", {"references": (np.zeros((33, 16, 3), np.uint8),)}, ["of 33 x 16, not multiples of 16"]),
        ("qwen-image", {"texts": {"text_encoder": text(seq=34)}}, ["tokens=34 are not more than the 34 of the chat"]),
        ("qwen-image", {"scale": float("inf")}, ["scale of the guidance=inf is not a number"]),
        ("qwen-image-edit", {"references": (), "seen": ()}, ["this model edits images: give one or more"]),
        ("qwen-image-edit", {"seen": ()}, ["1 are given, and 0 to be seen"]),
        ("flux1-dev", {"texts": {}}, ["prompt: given for nothing, and text_encoder, text_encoder_2 read it"]),
        (
            "flux1-dev",
            {"negative": {"text_encoder": text()}, "scale": 2.0},
            ["negative prompt: given for text_encoder, and text_encoder, text_encoder_2 read it"],
        ),
        ("flux1-dev", {"scale": 2.0}, ["negative prompt: none is given at a scale of the guidance of 2: change one"]),
        ("qwen-image", {"scale": 1.0}, ["negative prompt: one is given at a scale of the guidance of 1: change one"]),
        (
            "qwen-image",
            {"texts": {"text_encoder": Text(np.ones((2, 80), np.int32), np.ones((2, 79), bool))}},
            ["prompt: ids of shape (2, 80) and a mask of (2, 79) for text_encoder"],
        ),
    ],
)
def test_all_that_cannot_be_is_named_with_what_can(name, more, words):
    said = refusal(name, **more)
    assert all(word in said for word in words), said


def test_numbers_that_are_not_whole_are_refused():
    made, parts, found = request("flux1-dev")
    for name, value in {"height": 512.0, "width": "512", "steps": 2.5, "told": "3"}.items():
        object.__setattr__(made, name, value)  # as where types are not checked
    with pytest.raises(InputError) as error:
        find_kind("flux").check(parts, found, made)
    for words in ("height=512.0 is not a whole", "width='512' is", "steps=2.5 is", "guidance='3' is not a number"):
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("pixels", "words"),
    [
        (np.zeros((64, 64, 3), np.float32), r"is float32\[64, 64, 3\]: give bytes \[height, width, 3\]"),
        (np.zeros((3, 64, 64), np.uint8), r"is uint8\[3, 64, 64\]"),
        (np.zeros((64, 64, 4), np.uint8), r"is uint8\[64, 64, 4\]"),
        (np.zeros((64, 64), np.uint8), r"is uint8\[64, 64\]"),
    ],
)
def test_reference_images_that_are_no_bytes_in_three_channels(pixels, words):
    made, parts, found = request("flux2-dev")
    object.__setattr__(made, "references", (pixels,))  # as where types are not checked
    with pytest.raises(InputError, match=f"image: {words}"):
        find_kind("flux2").check(parts, found, made)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"prompts": "a fox"}, "prompts='a fox' are not a tuple of texts"),
        ({"prompts": (1,)}, "are not a tuple of texts"),
        ({"negative": ("fog",)}, "negative=.* is not a text"),
        ({"guidance": 2.0}, "guidance=2.0 is not a tuple of scales"),
        ({"images": (np.zeros((64, 64, 3), np.uint8),)}, "image: a ndarray is no picture"),
        ({"images": PIL.Image.new("RGB", (64, 64))}, "image: a Image is no picture"),
    ],
)
def test_one_where_several_are_meant_is_refused(wanted, words):
    with pytest.raises(InputError, match=words):
        unchecked(**wanted)


def unchecked(**fields):
    """What is wanted, as where types are not checked."""
    wanted = Wanted(prompts=("a fox",))
    for name, value in fields.items():
        object.__setattr__(wanted, name, value)
    wanted.__post_init__()
    return wanted


def test_sizes_may_be_numpys_and_keys_of_the_old_kind():
    wanted = unchecked(height=np.int64(64), width=np.int32(32), steps=np.int16(2))
    image_pipeline.refuse_unknown(wanted)
    made, parts, found = request("flux1-dev", **image_pipeline.sides(wanted, 8))
    find_kind("flux").check(parts, found, made)
    shape = find_kind("flux").latent_shape(parts["vae"].config, made)
    assert shape == (2, 16, 8, 4) and {type(size) for size in shape} == {int}
    assert image_pipeline.starting_noise(shape, jax.random.PRNGKey(0), None).shape == shape


@pytest.mark.parametrize(("rows", "split"), [(1, P()), (3, P()), (4, P("data"))])
def test_what_each_step_is_told_lies_whole_along_the_sequence(rows, split):
    assert image_pipeline.told_rows(make_mesh(data=2, context=2), rows).spec == split


@pytest.mark.parametrize("name", FOR)
def test_no_prompt_is_refused(name):
    with pytest.raises(InputError, match="prompts: none was given"):
        find_kind(FOR[name][0]).request(declared(name), settings(name), Wanted(prompts=()), lambda name: None)


def test_components_of_another_model_are_refused():
    made, parts, found = request("flux2-dev")
    parts["text_encoder"] = decoder.declare(decoder.PRESETS["qwen3-4b"])
    parts["vae"] = image_vae.declare(image_vae.PRESETS["flux1-vae"])
    with pytest.raises(InputError) as error:
        find_kind("flux2").check(parts, found, made)
    assert "vae's tokens=64" in str(error.value) and "embed x 3=7680" in str(error.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"_class_name": "DDIMScheduler"}, ["'DDIMScheduler' is not implemented"]),
        (
            {"use_karras_sigmas": True, "num_train_timesteps": 500},
            ["use_karras_sigmas=True", "num_train_timesteps=500"],
        ),
        ({"time_shift_type": "cubic", "max_shift": "x"}, ["time_shift_type='cubic'", "max_shift='x'"]),
        ({"shift": 0.0, "shift_terminal": 1.0}, ["shift of 0 or less", "shift_terminal=1.0"]),
        (
            {"use_dynamic_shifting": True, "base_image_seq_len": 256, "max_image_seq_len": 256.0},
            ["base_image_seq_len=256 and max_image_seq_len=256.0"],
        ),
        (
            {"use_dynamic_shifting": True, "base_image_seq_len": 256.5},
            ["base_image_seq_len=256.5 and", "whole numbers"],
        ),
        (
            {"shift": 10**400, "base_image_seq_len": True, "max_shift": [], "base_shift": float("inf")},
            ["shift=1000", "base_image_seq_len=True", "max_shift=[]", "base_shift=inf"],
        ),
        ({"shift_terminal": -(10**400)}, ["shift_terminal=-1000"]),
    ],
)
def test_schedulers_that_are_not_implemented_are_refused(config, words):
    with pytest.raises(InputError) as error:
        image_pipeline.read_settings({"scheduler": {"_class_name": "FlowMatchEulerDiscreteScheduler", **config}})
    assert all(word in str(error.value) for word in words)


def test_a_line_that_is_not_used_may_be_any():
    config = {"_class_name": "FlowMatchEulerDiscreteScheduler", "base_image_seq_len": 9, "max_image_seq_len": 9}
    assert image_pipeline.read_settings({"scheduler": config}).shift == 1.0


def test_a_shift_beyond_numbers_is_refused():
    with pytest.raises(InputError, match=r"mu=\d.* is not from -80 to 80"):
        image_pipeline.Settings(line=(256, 257, 0.5, 50.0)).sampler(4096, 4)
    with pytest.raises(InputError, match=r"mu=nan is not"):
        image_pipeline.Settings(line=(256, 257, -1e308, 1e308)).sampler(4096, 4)


def test_a_fixed_shift_takes_the_place_of_one_by_size():
    found = dataclasses.replace(settings("flux2-dev"), shift=3.0)
    sampler = found.sampler(4096, 5)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(5, sigmas=np.linspace(1.0, 1 / 5, 5))
    np.testing.assert_array_equal(sampler.levels, scheduler.sigmas.numpy())


def test_rows_of_unlike_lengths_are_padded_on_the_right():
    rows = image_pipeline.padded([[5, 6, 7], [8]], 9)
    np.testing.assert_array_equal(rows.ids, [[5, 6, 7], [8, 9, 9]])
    np.testing.assert_array_equal(rows.mask, [[1, 1, 1], [1, 0, 0]])
    left = image_pipeline.padded([[5, 6], [8]], 9, True, length=3)
    np.testing.assert_array_equal(left.ids, [[9, 5, 6], [9, 9, 8]])
    np.testing.assert_array_equal(left.mask, [[0, 1, 1], [0, 0, 1]])
    shorter = Text(left.ids[:, :2], left.mask[:, :2])
    both = image_pipeline.Request(texts={"a": rows}, negative={"a": shorter}, scale=2.0).rows("a")
    assert both.ids.shape == (4, 3) and not both.mask[2:, 2].any()


def test_a_negative_prompt_that_would_do_nothing_is_refused():
    wanted = Wanted(prompts=("a fox",), negative="fog")
    refuse_idle_negative(wanted, 1.5)
    refuse_idle_negative(Wanted(prompts=("a fox",)), 1.0)
    with pytest.raises(InputError, match="negative does nothing at guidance=1: give a scale above 1"):
        refuse_idle_negative(wanted, 1.0)


def test_a_text_encoder_of_too_few_layers_is_refused_by_name():
    parts = declared("flux2-dev")
    few = dataclasses.replace(decoder.PRESETS[DECODERS["flux2-dev"]], layers=29)
    with pytest.raises(InputError, match="text_encoder: layers=29 are fewer than the 30"):
        find_kind("flux2").run_parts(parts | {"text_encoder": decoder.declare(few)}, settings("flux2-dev"))
