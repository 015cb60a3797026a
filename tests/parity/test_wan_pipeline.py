"""Whole tiny pipelines against those of diffusers: the same weights, by way of checkpoints, noise and prompts."""

import functools
import weakref

import jax
import numpy as np
import PIL.Image
import pytest
import tiny_wan
import torch

from shardzoo import checkpoints
from shardzoo.checkpoints.pipeline import open_pipeline
from shardzoo.convert import pipeline as pipelines
from shardzoo.convert.pipeline_source import find_pipeline
from shardzoo.zoo import wan_pipeline
from shardzoo.zoo.mesh import make_mesh
from shardzoo.zoo.wan_pipeline import Components, Request

PROMPT, NEGATIVE = "a red fox jumps over the lazy dog", "blurry"
GUIDANCE = {2: (4.0, 2.5), 1: (3.0,)}
STEPS = 4


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Kind -> the pipeline of diffusers, and ours from its folder."""

    @functools.cache
    def of(kind):
        folder = tmp_path_factory.mktemp("pipelines")
        theirs = tiny_wan.pipeline(kind)
        theirs.save_pretrained(folder / "source")
        pipelines.convert(find_pipeline(folder / "source"), folder / "ours", sync=False)
        theirs.set_progress_bar_config(disable=True)
        return theirs, open_pipeline(folder / "ours")

    return of


def size(kind):
    return {"height": 64, "width": 96} if kind == "ti2v" else {"height": 32, "width": 48}


def pictures(kind, count):
    rng = np.random.default_rng(3)
    shape = (count, *size(kind).values(), 3)
    return [picture.astype(np.uint8) for picture in rng.integers(0, 256, shape)]


def request(theirs, kind, images):
    ids = [theirs.tokenizer(text).input_ids for text in (PROMPT, NEGATIVE)]
    given = dict(zip(("image", "last_image"), images, strict=False))
    guidance = GUIDANCE[tiny_wan.KINDS[kind][3]]
    return Request(ids=ids[0], negative_ids=ids[1], frames=9, steps=STEPS, guidance=guidance, **size(kind), **given)


def reference(theirs, wanted, images, noise):
    """Latents and video of diffusers, and how many times each transformer was called."""
    more = {"guidance_scale_2": wanted.guidance[1]} if len(wanted.guidance) > 1 else {}
    opened = [PIL.Image.fromarray(image) for image in images]
    more |= dict(zip(("image", "last_image"), opened, strict=False))
    run = functools.partial(
        theirs,
        prompt=PROMPT,
        negative_prompt=NEGATIVE,
        height=wanted.height,
        width=wanted.width,
        num_frames=wanted.frames,
        num_inference_steps=STEPS,
        guidance_scale=wanted.guidance[0],
        **more,
    )
    latents = run(latents=torch.from_numpy(noise), output_type="latent").frames
    return latents.numpy()


def ours(pipeline, mesh, wanted, noise):
    declared = {name: pipeline.checkpoint(name).declared for name in pipeline.components}
    before: list[weakref.ref] = []

    def live(name):
        """The component, once no other one is left on the devices."""
        assert not any(ref() is not None for ref in before), f"{name}: another component is still there"
        model = checkpoints.restore(pipeline.checkpoint(name), mesh)
        before[:] = [weakref.ref(leaf) for leaf in jax.tree.leaves(model)]
        return model

    parts = Components(declared=declared, live=live)
    settings = wan_pipeline.read_settings(pipeline.settings, "diffusers")
    told = []
    latents = wan_pipeline.sample(
        parts, mesh, settings, wanted, noise=noise, on_step=lambda done, total: told.append((done, total))
    )
    assert told == [(i + 1, STEPS) for i in range(STEPS)]
    video = np.concatenate(list(wan_pipeline.frames(parts, mesh, latents)))
    return np.asarray(latents), video


MESHES = {"one": {}, "all": {"data": 2, "context": 2, "tensor": 2}}
CASES = [
    ("t2v", 0),
    ("t2v-a14b", 0),
    ("i2v-a14b", 1),
    ("i2v-a14b", 2),
    ("ti2v", 0),
    ("ti2v", 1),
    ("i2v", 1),
    ("flf2v", 2),
]
QUICK = [("flf2v", 2, "all")]


def cases():
    for kind, count in CASES:
        for mesh in MESHES:
            slow = (kind, count, mesh) not in QUICK
            yield pytest.param(kind, count, mesh, marks=[pytest.mark.slow] if slow else [], id=f"{kind}-{count}-{mesh}")


@pytest.mark.parametrize(("kind", "count", "mesh"), [*cases()])
def test_latents_and_video_are_those_of_diffusers(made, kind, count, mesh):
    theirs, pipeline = made(kind)
    if kind == "ti2v" and count:
        theirs = tiny_wan.as_image_to_video(theirs)
    images = pictures(kind, count)
    wanted = request(theirs, kind, images)
    degrees = MESHES[mesh]
    devices = jax.devices()[: int(np.prod(list(degrees.values()), dtype=int))]
    shape = wan_pipeline.latent_shape(pipeline.checkpoint("vae").config, wanted)
    noise = np.random.default_rng(7).standard_normal(shape).astype(np.float32)
    latents, video = ours(pipeline, make_mesh(**degrees, devices=devices), wanted, noise)
    expected = reference(theirs, wanted, images, noise)
    assert np.abs(latents - expected).max() <= 5e-5 * np.abs(expected).max()
    with torch.no_grad():
        config = theirs.vae.config
        mean, std = (torch.tensor(x).view(1, -1, 1, 1, 1) for x in (config.latents_mean, config.latents_std))
        decoded = theirs.vae.decode(torch.from_numpy(expected) * std + mean).sample
        frames = theirs.video_processor.postprocess_video(decoded, output_type="np")[0]
    assert video.shape == frames.shape == (9, wanted.height, wanted.width, 3)
    assert frames.std() > 0.05
    assert np.abs(video - frames * 255).max() < 0.5 + 0.05


@pytest.mark.slow
def test_without_guidance_the_negative_prompt_is_of_no_account(made):
    theirs, pipeline = made("t2v-a14b")
    wanted = request(theirs, "t2v-a14b", [])
    mesh = make_mesh(devices=jax.devices()[:1])
    plain = Request(**{**vars(wanted), "guidance": (1.0,)})
    other = Request(**{**vars(plain), "negative_ids": [5, 1]})
    shape = wan_pipeline.latent_shape(pipeline.checkpoint("vae").config, wanted)
    noise = np.random.default_rng(7).standard_normal(shape).astype(np.float32)
    (one, _), (two, _), (three, _) = (ours(pipeline, mesh, r, noise) for r in (plain, other, wanted))
    np.testing.assert_array_equal(one, two)
    assert np.abs(one - three).max() > 1e-2
