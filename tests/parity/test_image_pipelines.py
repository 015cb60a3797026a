"""Whole tiny pipelines of images against those of diffusers: the same weights, by way of checkpoints, and noise."""

import dataclasses
import functools
import weakref

import jax
import numpy as np
import PIL.Image
import pytest
import tiny_images
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as edit
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as edit_plus

from shardzoo import checkpoints
from shardzoo.checkpoints.pipeline import open_pipeline
from shardzoo.cli.media import Picture
from shardzoo.cli.tokenizers import read_tokenizer
from shardzoo.convert import pipeline as pipelines
from shardzoo.convert.pipeline_source import find_pipeline
from shardzoo.zoo.mesh import make_mesh
from shardzoo.zoo.pipelines import Components, Wanted, find_kind

PROMPTS = ("a red fox jumps over the lazy dog", "snow")
STEPS = 4
SIZE = {"height": 16, "width": 24}
# name -> (kind, what is asked for besides, what diffusers is asked for besides)
CASES = {
    "flux-dev": ("flux-dev", {"guidance": (3.5,)}, {"guidance_scale": 3.5, "max_sequence_length": 512}),
    "flux-dev-negative": (
        "flux-dev",
        {"guidance": (2.0,), "negative": "blurry", "true_guidance": 3.0},
        {"guidance_scale": 2.0, "negative_prompt": "blurry", "true_cfg_scale": 3.0, "max_sequence_length": 512},
    ),
    "flux-schnell": ("flux-schnell", {}, {"max_sequence_length": 256}),
    "flux2-dev": ("flux2-dev", {}, {"guidance_scale": 4.0}),
    "flux2-dev-edit": ("flux2-dev", {"images": ((67, 80), (64, 70))}, {"guidance_scale": 4.0}),
    "flux2-klein": ("flux2-klein", {}, {}),
    "flux2-klein-edit": ("flux2-klein", {"images": ((64, 67),)}, {}),
    "flux2-klein-base": ("flux2-klein-base", {"guidance": (3.0,)}, {"guidance_scale": 3.0}),
    "qwen-image": (
        "qwen-image",
        {"guidance": (3.0,), "negative": "blurry and long"},
        {"true_cfg_scale": 3.0, "negative_prompt": "blurry and long"},
    ),
    "qwen-image-plain": ("qwen-image", {"guidance": (1.0,)}, {}),
    "qwen-edit": (
        "qwen-edit",
        {"guidance": (3.0,), "images": ((40, 90),), "prompts": PROMPTS[:1]},
        {"true_cfg_scale": 3.0, "negative_prompt": " "},
    ),
    "qwen-edit-plus": (
        "qwen-edit-plus",
        {"guidance": (2.5,), "images": ((40, 90), (64, 50)), "negative": "blurry", "prompts": PROMPTS[1:]},
        {"true_cfg_scale": 2.5, "negative_prompt": "blurry"},
    ),
}
MESHES = {"one": {}, "all": {"data": 2, "context": 2, "tensor": 2}}
QUICK = [("flux-dev-negative", "all"), ("flux2-klein-edit", "all"), ("qwen-edit-plus", "all")]
AREA = 64 * 64  # pixels of an image that is edited, of about 1024 x 1024 in truth


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Kind -> the pipeline of diffusers, and ours from its folder."""

    @functools.cache
    def of(kind):
        folder = tmp_path_factory.mktemp("pipelines")
        theirs = tiny_images.pipeline(kind)
        theirs.save_pretrained(folder / "source")
        pipelines.convert(find_pipeline(folder / "source"), folder / "ours", sync=False)
        return theirs, open_pipeline(folder / "ours")

    return of


def pictures(sizes):
    rng = np.random.default_rng(3)
    return [PIL.Image.fromarray(rng.integers(0, 256, (*size, 3)).astype(np.uint8)) for size in sizes]


def packed(theirs, noise):
    """Noise as the pipeline of diffusers takes it."""
    batch, channels, height, width = noise.shape
    given = torch.from_numpy(noise)
    if hasattr(theirs, "_patchify_latents"):
        return theirs._patchify_latents(given)
    return theirs._pack_latents(given, batch, channels, height, width)


def reference(theirs, case, noise):
    """Latents after the last step, and images, of diffusers."""
    _, more, options = CASES[case]
    prompts, kept = list(more.get("prompts", PROMPTS)), []
    if "images" in more:
        options = options | {"image": pictures(more["images"])}
    if case == "qwen-edit":
        options = options | {"image": options["image"][0]}
    if "negative_prompt" in options:
        options = options | {"negative_prompt": [options["negative_prompt"]] * len(prompts)}
    images = theirs(
        prompt=prompts,
        **SIZE,
        num_inference_steps=STEPS,
        latents=packed(theirs, noise),
        output_type="np",
        callback_on_step_end=lambda pipe, i, t, given: kept.append(given["latents"]) or given,
        **options,
    ).images
    return kept[-1].numpy(), images


def parts_of(pipeline, mesh, kind, settings):
    declared = {name: pipeline.checkpoint(name).declared for name in pipeline.components}
    assert kind.needed(declared, settings) == []
    declared = kind.run_parts(declared, settings)
    before: list[weakref.ref] = []

    def live(name):
        """The component, once no other one is left on the devices."""
        assert not any(ref() is not None for ref in before), f"{name}: another component is still there"
        model = checkpoints.restore(pipeline.checkpoint(name), mesh, declared=declared[name], part=True)
        before[:] = [weakref.ref(leaf) for leaf in jax.tree.leaves(model)]
        return model

    return Components(declared=declared, live=live)


def asked(case):
    more = dict(CASES[case][1])
    if "images" in more:
        more["images"] = tuple(Picture(picture) for picture in pictures(more["images"]))
    return Wanted(**{"prompts": PROMPTS, "steps": STEPS, **SIZE, **more})


def made_small(monkeypatch, theirs, settings):
    """Images to edit of few pixels in both, and positions of images as the models were trained.

    transformers 5 counts those in rows and columns only where it is told which tokens are of images, and diffusers 0.42
    does not tell it.
    """
    if not hasattr(settings, "reference_area"):
        return settings
    small = edit.calculate_dimensions
    monkeypatch.setattr(edit, "calculate_dimensions", lambda _, ratio: small(AREA, ratio))
    monkeypatch.setattr(edit_plus, "CONDITION_IMAGE_SIZE", AREA)
    monkeypatch.setattr(edit_plus, "VAE_IMAGE_SIZE", AREA)
    forward, token = theirs.text_encoder.forward, theirs.text_encoder.config.image_token_id

    def told(*given, **more):
        return forward(*given, **more, mm_token_type_ids=(more["input_ids"] == token).int())

    monkeypatch.setattr(theirs.text_encoder, "forward", told)
    return dataclasses.replace(settings, seen_area=AREA, reference_area=AREA)


def cases():
    for case in CASES:
        for mesh in MESHES:
            slow = (case, mesh) not in QUICK
            yield pytest.param(case, mesh, marks=[pytest.mark.slow] if slow else [], id=f"{case}-{mesh}")


@pytest.mark.parametrize(("case", "mesh"), [*cases()])
def test_latents_and_images_are_those_of_diffusers(made, monkeypatch, case, mesh):
    theirs, pipeline = made(CASES[case][0])
    kind = find_kind(pipeline.kind)
    degrees = MESHES[mesh]
    mesh = make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values()), dtype=int))])
    settings = made_small(monkeypatch, theirs, kind.read_settings(pipeline.settings, "diffusers"))
    parts = parts_of(pipeline, mesh, kind, settings)
    request = kind.request(parts.declared, settings, asked(case), lambda name: read_tokenizer(pipeline, name))
    shape = kind.latent_shape(parts.declared["vae"].config, request)
    noise = np.random.default_rng(7).standard_normal(shape).astype(np.float32)
    told = []
    latents = kind.sample(
        parts, mesh, settings, request, noise=noise, on_step=lambda done, total: told.append((done, total))
    )
    assert told == [(i + 1, STEPS) for i in range(STEPS)]
    images = np.concatenate(list(kind.frames(parts, mesh, latents)))
    expected, pixels = reference(theirs, case, noise)
    found = packed(theirs, np.array(latents)).numpy()
    found = found.reshape(*found.shape[:2], -1).swapaxes(1, 2) if found.ndim == 4 else found
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 5e-5 * np.abs(expected).max()
    assert images.shape == pixels.shape == (request.batch, *SIZE.values(), 3) and images.dtype == np.uint8
    assert pixels.std() > 0.05
    assert np.abs(images - pixels * 255).max() < 0.5 + 0.05
