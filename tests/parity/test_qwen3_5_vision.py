"""Qwen3.5 with images against transformers: the tower, positions, prompts with images and videos, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch_qwen3_5_vision import IMAGE, VIDEO, build, given, prompt, values
from torch_values import arrays, error, rms
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as processing

from shardzoo.errors import InputError
from shardzoo.zoo import layout, qwen3_5, qwen3_5_inputs, qwen3_5_vision
from shardzoo.zoo.generate import padded_right
from shardzoo.zoo.mesh import make_mesh
from shardzoo.zoo.qwen3_5_generate import generate

TOLERANCE = 5e-5
# name -> (changes of the vision config, grids of the images)
CASES = {
    "tiny": ({}, ((1, 4, 4),)),
    "odd": (dict(patch_size=6, depth=3, num_position_embeddings=30), ((1, 14, 10), (1, 2, 8))),  # a table of 5 x 5
    "video": (dict(patch_size=4, num_heads=2, intermediate_size=37), ((1, 6, 2), (3, 4, 6), (1, 2, 2))),
    "merge": (dict(spatial_merge_size=3, patch_size=4, num_position_embeddings=81), ((1, 9, 15), (1, 3, 6))),
    "channels": (dict(temporal_patch_size=1, in_channels=2, num_position_embeddings=1), ((2, 8, 6),)),
    "one row": (dict(spatial_merge_size=1, out_hidden_size=48, num_heads=8), ((1, 1, 7), (2, 3, 1))),
}
QUICK = ("odd", "video")


def live(config, model, stored=np.float32):
    ours = qwen3_5_vision if isinstance(config, qwen3_5_vision.Config) else qwen3_5
    declared = ours.declare(config, stored)
    named = {k: v.astype(stored) for k, v in values(arrays(model), config).items()}
    return declared, layout.place(declared, make_mesh(), layout.fill(declared, named))


def reference(model, pixels, grids, cotangent, dtype=torch.float32):
    """Features, and the gradients of their weighted sum for the model and for the pixels."""
    tower = model.to(dtype).model.visual
    model.zero_grad()
    patches = torch.tensor(pixels, dtype=dtype).requires_grad_()
    out = tower(patches, grid_thw=torch.tensor(grids)).pooler_output
    (out.float() * torch.tensor(cotangent)).sum().backward()
    return out.detach().float().numpy(), arrays(model, grads=True), patches.grad.float().numpy()


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in CASES if n not in QUICK)])
def test_tower_float32(name):
    changes, grids = CASES[name]
    model, _, config, _ = build(**changes)
    rng = np.random.default_rng(1)
    seq = sum(int(np.prod(grid)) for grid in grids)
    pixels = rng.normal(size=(seq, config.pixels)).astype(np.float32)
    cotangent = rng.normal(size=(seq // config.merge**2, config.out)).astype(np.float32)
    want, want_grads, want_pixels = reference(model, pixels, grids, cotangent)
    declared, ours = live(config, model)
    f = qwen3_5_vision.forward(declared, make_mesh())

    def total(ours, pixels):
        out = f(ours, pixels, grids=grids)
        return jnp.sum(out * cotangent), out

    (_, got), (grads, of_pixels) = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(ours, pixels)
    assert got.shape == want.shape and error(got, want) <= TOLERANCE
    assert error(of_pixels, want_pixels) <= TOLERANCE
    wanted = values(want_grads, config)
    for path, grad in layout.named(grads).items():
        assert error(grad, wanted[path]) <= TOLERANCE, path
    assert all(np.abs(g).max() > 0 for g in wanted.values())


def test_tower_bfloat16():
    """By root mean square, at most 1.25 times as far from the reference in float32 as the reference in bfloat16 is."""
    changes, grids = CASES["odd"]
    model, _, config, _ = build(**changes)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.to(torch.bfloat16).float())
    seq = sum(int(np.prod(grid)) for grid in grids)
    pixels = np.random.default_rng(1).normal(size=(seq, config.pixels)).astype(jnp.bfloat16).astype(np.float32)
    ones = np.ones((seq // config.merge**2, config.out), np.float32)
    exact, *_ = reference(model, pixels, grids, ones)
    declared, ours = live(config, model, jnp.bfloat16)
    got = jax.jit(lambda m, x: qwen3_5_vision.forward(declared, make_mesh())(m, x, grids=grids))(ours, pixels)
    half, *_ = reference(model, pixels, grids, ones, torch.bfloat16)
    assert rms(np.asarray(got, np.float32) - exact) <= 1.25 * rms(half - exact)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "side"),
    [("one", "right"), ("several", "left"), ("several", "right"), ("video", "left")],
)
def test_gradients_of_prompts_float32(name, side):
    """Logits and all gradients of both parts, with what images and videos give among the tokens.

    Of weights for which the reference's own gradients move by less than the tolerance with the weights' last bits.
    """
    check_prompt(name, side, gradients=True)


def test_prompts_float32():
    check_prompt("video", "left", gradients=False)


def check_prompt(name, side, *, gradients):
    model, _, vision_config, text_config = build(seed=int(name == "several"))
    images, videos, tokens, mask = prompt(name, side)
    rng = np.random.default_rng(3)
    pixels = rng.normal(size=(sum(map(np.prod, images + videos)), vision_config.pixels)).astype(np.float32)
    cotangent = rng.normal(size=(*tokens.shape, text_config.vocab)).astype(np.float32) * mask[..., None]
    ids, seen = torch.tensor(tokens), torch.tensor(mask).long()
    out = model(input_ids=ids, attention_mask=seen, **given(pixels, images, videos, tokens)).logits
    (see, eyes), (read, mind) = live(vision_config, model), live(text_config, model)
    vision, text = qwen3_5_vision.forward(see, make_mesh()), qwen3_5.forward(read, make_mesh())
    where = dict(
        positions=qwen3_5_inputs.positions(tokens, images, IMAGE, videos=videos, video_token=VIDEO, mask=mask),
        places=qwen3_5_inputs.places(tokens, IMAGE, VIDEO),
    )

    def total(eyes, mind):
        logits = text(mind, tokens, mask=mask, features=vision(eyes, pixels, grids=images + videos), **where)
        return jnp.sum(logits * cotangent), logits

    if gradients:
        (_, got), grads = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(eyes, mind)
    else:
        (_, got), grads = jax.jit(total)(eyes, mind), ()
    assert error(np.asarray(got) * mask[..., None], out.detach().numpy() * mask[..., None]) <= TOLERANCE
    (out * torch.tensor(cotangent)).sum().backward()
    want_grads = arrays(model, grads=True)
    for config, found in zip((vision_config, text_config), grads, strict=False):
        wanted = values(want_grads, config)
        for path, grad in layout.named(found).items():
            assert error(grad, wanted[path]) <= TOLERANCE, path


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("video", {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("one", {}), ("several", dict(context=3)), ("video", dict(data=2, context=2, tensor=2)))
        ),
    ],
    ids=str,
)
def test_greedy_generation(name, degrees):
    """Tokens after a prompt with images and videos: those of transformers' own generate, which pads on the left."""
    model, _, vision_config, text_config = build()
    images, videos, tokens, mask = prompt(name, "left")
    pixels = np.random.default_rng(3).normal(size=(sum(map(np.prod, images + videos)), vision_config.pixels))
    pixels = pixels.astype(np.float32)
    want = model.generate(
        input_ids=torch.tensor(tokens), attention_mask=torch.tensor(mask).long(), max_new_tokens=8, do_sample=False,
        pad_token_id=0, eos_token_id=None, **given(pixels, images, videos, tokens),
    )[:, tokens.shape[1] :]  # fmt: skip
    (see, eyes), mesh = live(vision_config, model), make_mesh(**degrees, kv_heads=4)
    features = jax.jit(lambda m, x: qwen3_5_vision.forward(see, make_mesh())(m, x, grids=images + videos))(eyes, pixels)
    tokens, lengths = padded_right(tokens, mask)
    mask = np.arange(tokens.shape[1]) < lengths[:, None]
    beside = dict(
        positions=qwen3_5_inputs.positions(tokens, images, IMAGE, videos=videos, video_token=VIDEO, mask=mask),
        places=qwen3_5_inputs.places(tokens, IMAGE, VIDEO),
        features=np.asarray(features),
    )
    declared = qwen3_5.declare(text_config)
    mind = layout.place(declared, mesh, layout.fill(declared, values(arrays(model), text_config)))
    got, _ = generate(declared, mesh)(mind, tokens, lengths, max_new_tokens=8, beside=beside)
    assert np.asarray(got).tolist() == want.tolist()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["one", "several", "video"])
def test_positions_are_those_of_transformers(name, side):
    model, *_ = build()
    images, videos, tokens, mask = prompt(name, side)
    shown = given(np.zeros((sum(map(np.prod, images + videos)), 1)), images, videos, tokens)
    shown = {k: v for k, v in shown.items() if not k.startswith("pixel")}
    want, _ = model.model.get_rope_index(torch.tensor(tokens), attention_mask=torch.tensor(mask).long(), **shown)
    got = qwen3_5_inputs.positions(tokens, images, IMAGE, videos=videos, video_token=VIDEO, mask=mask)
    np.testing.assert_array_equal(got, np.moveaxis(want.numpy(), 0, -1))
    places = qwen3_5_inputs.places(tokens, IMAGE, VIDEO)
    rows = sum(map(np.prod, images + videos)) // 4
    assert sorted(places[places >= 0]) == list(range(rows))
    np.testing.assert_array_equal(places >= 0, (tokens == IMAGE) | (tokens == VIDEO))


def test_images_that_do_not_fit_the_tokens_are_refused():
    images, videos, tokens, mask = prompt("video")
    with pytest.raises(InputError) as refused:
        qwen3_5_inputs.positions(tokens, images[:1], IMAGE, videos=videos[:1], video_token=VIDEO, mask=mask)
    for part in ("6 of images, grids are of 2", "(token 152)", "5 of images, grids are of 4", "(token 153)"):
        assert part in str(refused.value)
    with pytest.raises(InputError, match="not as many tokens in one row"):
        qwen3_5_inputs.positions(tokens, images[::-1], IMAGE, videos=videos, video_token=VIDEO, mask=mask)


@pytest.mark.parametrize("size", [(64, 96), (32, 32)])
def test_patches_are_those_of_the_processor(size):
    """An image of a size that is kept: rescaled, normed and cut as transformers does it."""
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    processor = processing.Qwen2VLImageProcessorPil(
        patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3, min_pixels=32 * 32, max_pixels=1 << 20
    )
    want = processor(images=[image], return_tensors="np", do_resize=False)
    got, grid = qwen3_5_inputs.patches((image / 127.5 - 1).transpose(2, 0, 1).astype(np.float32))
    assert grid == tuple(want["image_grid_thw"][0])
    np.testing.assert_allclose(got, want["pixel_values"], rtol=0, atol=2e-6)
    np.testing.assert_array_equal(
        qwen3_5_inputs.fitting_size(999, 30),
        processing.smart_resize(999, 30, factor=32, min_pixels=256 * 256, max_pixels=4096 * 4096),
    )


def test_patches_of_a_video_are_those_of_its_frames():
    """Two frames to a patch; an odd last one stands twice."""
    video = np.random.default_rng(0).normal(size=(3, 3, 32, 64)).astype(np.float32)
    got, grid = qwen3_5_inputs.video_patches(video)
    assert grid == (2, 2, 4)
    each = [qwen3_5_inputs.patches(frame, frames=1)[0].reshape(8, 3, 1, 256) for frame in (*video, video[-1])]
    pairs = [np.concatenate(each[i : i + 2], axis=2).reshape(8, -1) for i in (0, 2)]
    np.testing.assert_array_equal(got, np.concatenate(pairs))
