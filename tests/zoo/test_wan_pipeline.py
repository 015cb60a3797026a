"""What the pipelines of the published models take and refuse, before any weight is there."""

import dataclasses

import numpy as np
import pytest

from shardzoo.errors import InputError
from shardzoo.zoo import clip_vision, t5, wan, wan_pipeline, wan_vae
from shardzoo.zoo.wan_pipeline import Request, Settings

FOR = {  # transformer -> autoencoder, settings, images that it takes
    "wan2.1-t2v-1.3b": ("wan2.1-vae", Settings(shift=3.0), {0}),
    "wan2.1-t2v-14b": ("wan2.1-vae", Settings(shift=5.0), {0}),
    "wan2.1-i2v-14b": ("wan2.1-vae", Settings(shift=5.0), {1}),
    "wan2.1-flf2v-14b": ("wan2.1-vae", Settings(shift=5.0), {2}),
    "wan2.2-t2v-a14b": ("wan2.1-vae", Settings(shift=12.0, boundary=0.875), {0}),
    "wan2.2-i2v-a14b": ("wan2.1-vae", Settings(shift=5.0, boundary=0.9), {1, 2}),
    "wan2.2-ti2v-5b": ("wan2.2-vae", Settings(shift=5.0, per_token=True), {0, 1}),
}


def declared(name):
    vae, settings, _ = FOR[name]
    found = {
        "text_encoder": t5.declare(t5.PRESETS["umt5-xxl"]),
        "transformer": wan.declare(wan.PRESETS[name]),
        "vae": wan_vae.declare(wan_vae.PRESETS[vae]),
    }
    if wan.PRESETS[name].image is not None:
        found["image_encoder"] = clip_vision.declare(clip_vision.PRESETS["vit-h-14"])
    return found | ({"transformer_2": found["transformer"]} if settings.boundary else {})


def request(name, images=None, **more):
    sizes = {"height": 704, "width": 1280, "frames": 121} if "ti2v" in name else {}
    made = Request(ids=[5, 1], negative_ids=[1], **{**sizes, **more})
    count = min(FOR[name][2]) if images is None else images
    pictures = [np.zeros((made.height, made.width, 3), np.uint8)] * count
    return dataclasses.replace(made, **dict(zip(("image", "last_image"), pictures, strict=False)))


def refusal(name, made):
    with pytest.raises(InputError) as error:
        wan_pipeline.check(declared(name), FOR[name][1], made)
    return str(error.value)


@pytest.mark.parametrize("name", FOR)
def test_published_sizes_are_taken(name):
    parts, settings, made = declared(name), FOR[name][1], request(name)
    wan_pipeline.check(parts, settings, made)
    shape = wan_pipeline.latent_shape(parts["vae"].config, made)
    assert shape == ((1, 48, 31, 44, 80) if "ti2v" in name else (1, 16, 21, 60, 104))
    assert shape[1] == parts["transformer"].config.out_channels
    for component in parts:
        rest = {key: value for key, value in parts.items() if key != component}
        assert wan_pipeline.needed(rest, settings) == [component]


@pytest.mark.parametrize("name", FOR)
@pytest.mark.parametrize("images", [0, 1, 2])
def test_images_are_taken_by_the_models_that_are_made_for_them(name, images):
    made = request(name, images)
    if images in FOR[name][2]:
        wan_pipeline.check(declared(name), FOR[name][1], made)
    else:
        assert "image: " in refusal(name, made)


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("wan2.1-t2v-1.3b", {"height": 481}, ["height=481 is not a multiple of 16: use 480 or 496"]),
        ("wan2.2-ti2v-5b", {"height": 720}, ["height=720 is not a multiple of 32: use 704 or 736"]),
        ("wan2.1-t2v-1.3b", {"width": 0}, ["width=0 is not a multiple of 16: use 16 or 32"]),
        ("wan2.1-t2v-1.3b", {"frames": 80}, ["frames=80 is not 1 + a multiple of 4: use 77 or 81"]),
        ("wan2.1-t2v-1.3b", {"frames": 0, "steps": 0}, ["frames=0", "use 1 or 5", "steps=0"]),
        ("wan2.1-t2v-1.3b", {"ids": []}, ["prompt: tokens=0"]),
        ("wan2.1-t2v-1.3b", {"negative_ids": [3] * 513}, ["negative prompt: tokens=513 are not 1 to 512"]),
        ("wan2.1-t2v-1.3b", {"guidance": (4.0, 3.0)}, ["2 scales for 1 transformers"]),
        ("wan2.2-t2v-a14b", {"guidance": (4.0, 3.0, 1.0)}, ["3 scales for 2 transformers"]),
        ("wan2.2-t2v-a14b", {"guidance": (-1.0, float("inf"))}, ["guidance=-1.0 is not a number to", "guidance=inf"]),
    ],
)
def test_all_that_cannot_be_is_named_with_what_can(name, more, words):
    said = refusal(name, dataclasses.replace(request(name), **more))
    assert all(word in said for word in words), said


def unchecked(made, **values):
    """A request with these values, as where types are not checked."""
    made = dataclasses.replace(made)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def test_numbers_may_be_those_of_numpy_and_must_be_whole():
    name = "wan2.1-i2v-14b"
    right = {"height": np.int64(480), "width": np.int32(832), "frames": np.int64(5), "steps": np.int64(3)}
    wan_pipeline.check(declared(name), FOR[name][1], unchecked(request(name, 1), **right, guidance=(np.float32(5),)))
    wrong = {"frames": True, "height": 480.0, "width": "832", "steps": 2.5, "guidance": 5.0}
    said = refusal(name, unchecked(request(name, 1), **wrong))
    for words in (
        "frames=True is not a whole",
        "height=480.0 is",
        "width='832' is",
        "steps=2.5 is",
        "=5.0 is not a tuple",
    ):
        assert words in said, said


def test_components_of_another_model_are_refused():
    parts, settings, _ = declared("wan2.1-i2v-14b"), *FOR["wan2.1-i2v-14b"][1:]
    parts["vae"] = wan_vae.declare(wan_vae.PRESETS["wan2.2-vae"])
    parts["text_encoder"] = t5.declare(dataclasses.replace(t5.PRESETS["umt5-xxl"], embed=1024))
    small = dataclasses.replace(clip_vision.PRESETS["vit-h-14"], embed=640)
    parts["image_encoder"] = clip_vision.declare(small)
    with pytest.raises(InputError) as error:
        wan_pipeline.check(parts, settings, request("wan2.1-i2v-14b"))
    for words in ("vae's latent_channels=48", "text_encoder's embed=1024", "image_encoder's embed=640"):
        assert words in str(error.value)


def test_images_of_another_size_are_refused():
    made = dataclasses.replace(request("wan2.1-i2v-14b"), image=np.zeros((480, 640, 3), np.uint8))
    assert "image: of 480 x 640, not 480 x 832" in refusal("wan2.1-i2v-14b", made)


def test_each_expert_takes_its_steps():
    made = dataclasses.replace(request("wan2.2-t2v-a14b"), steps=40, guidance=(4.0, 3.0))
    settings = FOR["wan2.2-t2v-a14b"][1]
    sampler = settings.sampler(40)
    (first, high, strong), (second, low, weak) = wan_pipeline._experts(settings, sampler, made)
    assert (first, second, strong, weak) == ("transformer", "transformer_2", 4.0, 3.0)
    assert [*high, *low] == list(range(40)) and min(sampler.timesteps[high.stop - 1], 875) == 875
    assert sampler.timesteps[low.start] < 875
    early = dataclasses.replace(settings, boundary=0.0)
    assert [name for name, *_ in wan_pipeline._experts(early, sampler, made)] == ["transformer"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"_class_name": "DDIMScheduler"}, ["'DDIMScheduler' is not implemented"]),
        (
            {"_class_name": "UniPCMultistepScheduler", "prediction_type": "epsilon", "use_karras_sigmas": True},
            ["prediction_type='epsilon' is not, 'flow_prediction' is", "use_karras_sigmas=True is not"],
        ),
        ({"_class_name": "FlowMatchEulerDiscreteScheduler", "use_dynamic_shifting": True}, ["use_dynamic_shifting"]),
        ({"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 500}, ["num_train_timesteps=500"]),
        ({"_class_name": ["UniPCMultistepScheduler"]}, ["scheduler: ['UniPCMultistepScheduler'] is not implemented"]),
        (
            {"_class_name": "UniPCMultistepScheduler", "flow_shift": 10**400, "solver_order": True},
            ["flow_shift=1000", "solver_order=True is not"],
        ),
        ({"_class_name": "UniPCMultistepScheduler", "flow_shift": True}, ["flow_shift=True"]),
    ],
)
def test_schedulers_that_are_not_implemented_are_refused(config, words):
    with pytest.raises(InputError) as error:
        wan_pipeline.read_settings({"scheduler": config}, "diffusers")
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("boundary", ["0.9", 1.5, True, [], 10**400])
def test_boundaries_that_are_no_noise_levels_are_refused(boundary):
    config = {"_class_name": "UniPCMultistepScheduler"}
    with pytest.raises(InputError, match="boundary_ratio="):
        wan_pipeline.read_settings({"scheduler": config, "boundary_ratio": boundary}, "diffusers")


def test_settings_are_those_of_the_config_files():
    config = {"_class_name": "UniPCMultistepScheduler", "prediction_type": "flow_prediction", "flow_shift": 3.0}
    given = {"scheduler": config, "boundary_ratio": 0.9, "expand_timesteps": True}
    expected = Settings(boundary=0.9, per_token=True, shift=3.0, manner="original")
    assert wan_pipeline.read_settings(given, "original") == expected
    euler = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 5.0}
    assert wan_pipeline.read_settings({"scheduler": euler}, "diffusers") == Settings(solver="euler", shift=5.0)
    # The two manners differ in their levels, by less than one timestep of a thousand at the start.
    ours, theirs = (dataclasses.replace(expected, manner=m).sampler(4).timesteps for m in ("diffusers", "original"))
    assert (ours != theirs).any() and abs(int(ours[0]) - int(theirs[0])) <= 1
