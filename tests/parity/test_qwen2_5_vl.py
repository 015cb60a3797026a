"""Qwen2.5-VL against transformers: the vision tower, and both towers together, with gradients; the image processor."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch_qwen2_5_vl import IMAGE, build, values
from torch_values import arrays, error, rms
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as processing

from shardzoo.errors import InputError
from shardzoo.zoo import decoder, layout, qwen2_5_vl, qwen2_5_vl_inputs
from shardzoo.zoo.mesh import make_mesh

TOLERANCE = 5e-5
# name -> (changes of the vision config, grids of the images)
CASES = {
    "one_window": (dict(patch_size=14, window_size=56, depth=2), ((1, 4, 4),)),
    "odd": ({}, ((1, 14, 10), (1, 2, 8))),  # windows of 3 x 3 squares that the images do not fill
    "several": (dict(window_size=24), ((1, 6, 2), (2, 4, 6), (1, 2, 2))),
    "merge": (dict(spatial_merge_size=3, patch_size=4, window_size=25, num_heads=2), ((1, 9, 15), (1, 3, 6))),
    "channels": (dict(temporal_patch_size=1, in_channels=2, depth=2, fullatt_block_indexes=[]), ((1, 8, 6),)),
}


def live(config, model, stored=np.float32):
    ours = qwen2_5_vl if isinstance(config, qwen2_5_vl.Config) else decoder
    declared = ours.declare(config, stored)
    named = {k: v.astype(stored) for k, v in values(arrays(model), config).items()}
    return declared, layout.place(declared, make_mesh(), layout.fill(declared, named))


def reference(model, pixels, grids, cotangent, dtype=torch.float32):
    """Features, and the gradients of their weighted sum for the model and for the pixels."""
    tower = model.to(dtype).model.visual
    model.zero_grad()
    given = torch.tensor(pixels, dtype=dtype).requires_grad_()
    out = tower(given, grid_thw=torch.tensor(grids)).pooler_output
    (out.float() * torch.tensor(cotangent)).sum().backward()
    return out.detach().float().numpy(), arrays(model, grads=True), given.grad.float().numpy()


@pytest.mark.parametrize("name", CASES)
def test_vision_float32(name):
    changes, grids = CASES[name]
    model, _, config, _ = build(vision=changes)
    rng = np.random.default_rng(1)
    seq = sum(int(np.prod(grid)) for grid in grids)
    pixels = rng.normal(size=(seq, config.pixels)).astype(np.float32)
    cotangent = rng.normal(size=(seq // config.merge**2, config.out)).astype(np.float32)
    want, want_grads, want_pixels = reference(model, pixels, grids, cotangent)
    declared, ours = live(config, model)
    f = qwen2_5_vl.forward(declared, make_mesh())

    def total(ours, pixels):
        out = f(ours, pixels, grids=grids)
        return jnp.sum(out * cotangent), out

    (_, got), (grads, of_pixels) = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(ours, pixels)
    assert got.shape == want.shape and error(got, want) <= TOLERANCE
    assert error(of_pixels, want_pixels) <= TOLERANCE
    for path, wanted in values(want_grads, config).items():
        assert error(layout.named(grads)[path], wanted) <= TOLERANCE, path


def test_vision_bfloat16():
    """By root mean square, at most 1.25 times as far from the reference in float32 as the reference in bfloat16 is."""
    changes, grids = CASES["odd"]
    model, _, config, _ = build(vision=changes)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.to(torch.bfloat16).float())
    seq = sum(int(np.prod(grid)) for grid in grids)
    pixels = np.random.default_rng(1).normal(size=(seq, config.pixels)).astype(jnp.bfloat16).astype(np.float32)
    ones = np.ones((seq // config.merge**2, config.out), np.float32)
    exact, *_ = reference(model, pixels, grids, ones)
    declared, ours = live(config, model, jnp.bfloat16)
    got = jax.jit(lambda m, x: qwen2_5_vl.forward(declared, make_mesh())(m, x, grids=grids))(ours, pixels)
    half, *_ = reference(model, pixels, grids, ones, torch.bfloat16)
    assert rms(np.asarray(got, np.float32) - exact) <= 1.25 * rms(half - exact)


START, END = 154, 155
PROMPTS = {  # grids of the images; tokens, with a grid's number where an image is
    "one": (((1, 4, 4),), [[5, START, "0", END, 9]]),
    "several": (
        ((1, 4, 6), (1, 2, 2), (1, 8, 4)),
        [[5, 7, START, "0", END, 1, 2, START, "1", END], [START, "2", END, 3, 4, 8, 6]],
    ),
}


def prompt(name, side):
    """Tokens, padded on the `side` given, and their mask."""
    grids, rows = PROMPTS[name]

    def spelled(x):
        return [IMAGE] * (int(np.prod(grids[int(x)])) // 4) if isinstance(x, str) else [x]

    rows = [[token for x in row for token in spelled(x)] for row in rows]
    longest = max(map(len, rows)) + 2
    tokens, mask = np.full((len(rows), longest), 151), np.zeros((len(rows), longest), bool)
    for row, ids in enumerate(rows):
        at = slice(longest - len(ids), None) if side == "left" else slice(len(ids))
        tokens[row, at], mask[row, at] = ids, True
    return grids, tokens, mask


@pytest.mark.parametrize(("name", "side"), [("one", "right"), ("several", "left"), ("several", "right")])
def test_prompts_with_images_float32(name, side):
    """Last hidden states with images in the prompt, positions along three axes, and all gradients."""
    model, _, vision_config, text_config = build()
    grids, tokens, mask = prompt(name, side)
    assert text_config.rope.sections == (2, 1, 1)
    rng = np.random.default_rng(3)
    pixels = rng.normal(size=(sum(map(np.prod, grids)), vision_config.pixels)).astype(np.float32)
    cotangent = rng.normal(size=(*tokens.shape, text_config.embed)).astype(np.float32) * mask[..., None]
    out = model.model(
        input_ids=torch.tensor(tokens), attention_mask=torch.tensor(mask).long(), pixel_values=torch.tensor(pixels),
        image_grid_thw=torch.tensor(grids), mm_token_type_ids=torch.tensor(tokens == IMAGE).int(),
    ).last_hidden_state  # fmt: skip
    (out * torch.tensor(cotangent)).sum().backward()
    want_grads = arrays(model, grads=True)
    (see, eyes), (read, mind) = live(vision_config, model), live(text_config, model)
    mesh = make_mesh()
    vision, encode = qwen2_5_vl.forward(see, mesh), decoder.encode(read, mesh)
    where = dict(
        positions=qwen2_5_vl_inputs.positions(tokens, grids, IMAGE, mask=mask),
        places=qwen2_5_vl_inputs.places(tokens, IMAGE),
    )

    def total(eyes, mind):
        states = encode(mind, tokens, mask, features=vision(eyes, pixels, grids=grids), **where)
        return jnp.sum(states * cotangent), states

    (_, got), grads = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(eyes, mind)
    assert error(np.asarray(got) * mask[..., None], out.detach().numpy() * mask[..., None]) <= TOLERANCE
    for config, found in zip((vision_config, text_config), grads, strict=True):
        for path, wanted in values(want_grads, config).items():
            if path != "head.weight":  # which `encode` does not read
                assert error(layout.named(found)[path], wanted) <= TOLERANCE, path


def test_text_alone_float32():
    """Logits and last hidden state of the language tower: all three positions of a token are the same."""
    model, _, _, config = build()
    tokens = np.random.default_rng(0).integers(0, 150, (2, 10))
    mask = np.arange(10) < np.array([[10], [6]])
    with torch.no_grad():
        want = model(torch.tensor(tokens), torch.tensor(mask).long(), output_hidden_states=True)
    declared, ours = live(config, model)
    logits = jax.jit(decoder.forward(declared, make_mesh()))(ours, tokens, mask=mask)
    states = jax.jit(decoder.encode(declared, make_mesh()))(ours, tokens, mask)
    assert error(logits, want.logits) <= TOLERANCE and error(states, want.hidden_states[-1]) <= TOLERANCE


@pytest.mark.parametrize("size", [(56, 84), (28, 28), (140, 56)])
def test_patches_are_those_of_the_processor(size):
    """An image of a size that is kept: rescaled, normed and cut as transformers does it."""
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    processor = processing.Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=1 << 20)
    want = processor(images=[image], return_tensors="np", do_resize=False)
    mean, std = np.array(qwen2_5_vl_inputs.MEAN), np.array(qwen2_5_vl_inputs.STD)
    normed = ((image / 255 - mean) / std).transpose(2, 0, 1).astype(np.float32)
    got, grid = qwen2_5_vl_inputs.patches(normed)
    assert grid == tuple(want["image_grid_thw"][0])
    np.testing.assert_allclose(got, want["pixel_values"], rtol=0, atol=2e-6)


@pytest.mark.parametrize("size", [(10, 1900), (999, 30), (100, 100), (5000, 7000), (29, 29), (43, 1307)])
@pytest.mark.parametrize("bounds", [{}, dict(least=100 * 100, most=300 * 300)])
def test_sizes_are_those_of_the_processor(size, bounds):
    want = processing.smart_resize(
        *size, factor=28, min_pixels=bounds.get("least", 56 * 56), max_pixels=bounds.get("most", 3584 * 3584)
    )
    assert qwen2_5_vl_inputs.fitting_size(*size, **bounds) == want


def test_images_that_do_not_fit_the_tokens_are_refused():
    grids, tokens, mask = prompt("several", "left")
    with pytest.raises(InputError, match="tokens: 15 of images, grids are of 7"):
        qwen2_5_vl_inputs.positions(tokens, grids[:2], IMAGE, mask=mask)
    with pytest.raises(InputError, match="not as many tokens in one row"):
        qwen2_5_vl_inputs.positions(tokens, ((1, 4, 4), (1, 2, 6), (1, 8, 4)), IMAGE, mask=mask)
    with pytest.raises(InputError, match="200 to 1"):
        qwen2_5_vl_inputs.fitting_size(1, 201)
    with pytest.raises(InputError, match="width=30 does not divide by 28"):
        qwen2_5_vl_inputs.patches(np.zeros((3, 28, 30), np.float32))
