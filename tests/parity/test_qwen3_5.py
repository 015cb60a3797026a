"""Qwen3.5 against transformers: logits and gradients, padding on both sides, positions and states of images."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from torch_qwen3_5 import CASES, build, harsh, values
from torch_values import arrays, error, rms

from shardzoo.convert.families.qwen3_5 import read_config
from shardzoo.zoo import layout, qwen3_5
from shardzoo.zoo.mesh import make_mesh
from shardzoo.zoo.qwen3_5_generate import generate

B, S = 3, 70  # more than a chunk
TOLERANCE = 5e-5
rng = np.random.default_rng(3)
TOKENS = rng.integers(0, 131, (B, S))
NOISE = rng.normal(size=(B, S, 160)).astype(np.float32)
MASK = np.stack([np.arange(S) >= 0, np.arange(S) >= 11, np.arange(S) < 49])  # no padding; on the left; on the right
RIGHT = np.arange(S) < np.array([70, 33, 66])[:, None]


def reference(model, mask, dtype=torch.float32):
    """Logits, with the gradients of sum(logits * NOISE) over the mask left in the model."""
    model = model.to(dtype)
    model.zero_grad()
    logits = model(input_ids=torch.tensor(TOKENS), attention_mask=torch.tensor(mask).long()).logits
    weights = torch.tensor(NOISE[..., : logits.shape[-1]] * mask[..., None])
    (logits.float() * weights).sum().backward()
    return logits.detach().float().numpy()


def ours(named_values, config, mask, stored=np.float32, by="mask", **options):
    declared, mesh = qwen3_5.declare(config, stored), make_mesh()
    cast = {k: v.astype(stored) for k, v in named_values.items()}
    model = layout.place(declared, mesh, layout.fill(declared, cast))
    f = qwen3_5.forward(declared, mesh, **options)
    how = {"mask": mask} if by == "mask" else {"lengths": mask.sum(1)}

    def total(model):
        logits = f(model, TOKENS, **how)
        return jnp.sum(logits * NOISE[..., : config.vocab] * mask[..., None], dtype=jnp.float32), logits

    (_, logits), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(model)
    return np.asarray(logits.astype(jnp.float32)), {
        k: np.asarray(v.astype(jnp.float32)) for k, v in layout.named(grads).items()
    }


@pytest.mark.parametrize(
    "name, next",
    [("published-pattern", False)]
    + [pytest.param(name, False, marks=pytest.mark.slow) for name in ("every-other", "two-super-blocks", "thirds")]
    + [pytest.param("thirds", True, marks=pytest.mark.slow)],
)
def test_float32(name, next):
    model, config = build(name, next=next)
    kind = "transformers, Qwen3-Next" if next else "transformers"
    want = reference(model, MASK)
    logits, grads = ours(values(arrays(model), config, kind), config, MASK)
    assert error(logits, want) <= TOLERANCE  # on padding as well
    wanted = values(arrays(model, grads=True), config, kind)
    assert grads.keys() == wanted.keys()
    errors = {path: error(grad, wanted[path]) for path, grad in grads.items()}
    assert max(errors.values()) <= TOLERANCE, errors
    assert all(np.abs(g).max() > 0 for g in wanted.values())


@pytest.mark.slow
def test_lengths_are_a_mask_on_the_right():
    model, config = build("every-other")
    want = reference(model, RIGHT)
    logits, grads = ours(values(arrays(model), config), config, RIGHT, by="lengths")
    assert error(logits * RIGHT[..., None], want * RIGHT[..., None]) <= TOLERANCE
    wanted = values(arrays(model, grads=True), config)
    assert all(error(g, wanted[path]) <= TOLERANCE for path, g in grads.items())


def test_bfloat16():
    """By root mean square, about as far from the reference in float32 as the reference in bfloat16 is."""
    model, config = build("published-pattern")
    rounded = {k: v.astype(jnp.bfloat16).astype(np.float32) for k, v in arrays(model).items()}
    with torch.no_grad():
        for path, weight in model.named_parameters():
            weight.copy_(torch.tensor(rounded[path]))
    exact = reference(model, RIGHT)
    half = reference(model, RIGHT, torch.bfloat16)
    logits, grads = ours(values(rounded, config), config, RIGHT, jnp.bfloat16)
    seen = RIGHT[..., None]
    assert rms((logits - exact) * seen) <= 1.25 * rms((half - exact) * seen)
    assert all(np.isfinite(g).all() for g in grads.values())


IMAGE = dict(
    image_token_id=152, video_token_id=153, vision_start_token_id=154, vision_end_token_id=155,
    tie_word_embeddings=False,
    vision_config=dict(
        model_type="qwen3_5_vision", depth=2, hidden_size=32, intermediate_size=48, num_heads=4, patch_size=16,
        spatial_merge_size=2, temporal_patch_size=2, out_hidden_size=64, num_position_embeddings=16,
    ),
)  # fmt: skip


def test_states_of_an_image_among_the_tokens():
    """The text model of the multimodal class: what its vision tower gives comes in by `features` and `places`."""
    torch.manual_seed(0)
    text = {**CASES["published-pattern"], "model_type": "qwen3_5_text"}
    theirs = transformers.Qwen3_5Config(text_config=text, **IMAGE)
    model = transformers.Qwen3_5ForConditionalGeneration(theirs).eval()
    harsh(model)
    ids, grid = torch.tensor([[5, 154, 152, 152, 152, 152, 155, 9]]), torch.tensor([[1, 4, 4]])
    kinds, pixels = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0]]), torch.randn(16, 1536)
    with torch.no_grad():
        want = model(input_ids=ids, mm_token_type_ids=kinds, pixel_values=pixels, image_grid_thw=grid).logits.numpy()
        states = torch.cat(list(model.get_image_features(pixels, grid).pooler_output)).numpy()
        positions, _ = model.model.get_rope_index(ids, kinds, image_grid_thw=grid)
    assert len(set(map(tuple, positions[:, 0].T.tolist()))) == 8 and (positions[1] != positions[2]).any()
    config = read_config(theirs.to_dict(), {})
    declared, mesh = qwen3_5.declare(config), make_mesh()
    named = values(arrays(model), config, name="transformers, multimodal")
    live = layout.place(declared, mesh, layout.fill(declared, named))
    places = np.where(ids.numpy() == 152, np.cumsum(ids.numpy() == 152, axis=1) - 1, -1)
    got = jax.jit(qwen3_5.forward(declared, mesh))(
        live, ids.numpy(), positions=np.moveaxis(positions.numpy(), 0, -1), features=states, places=places
    )
    assert error(np.asarray(got), want) <= TOLERANCE


@pytest.mark.parametrize("name", ["published-pattern", pytest.param("every-other", marks=pytest.mark.slow)])
def test_greedy_generation(name):
    """Prefill and decode steps from both caches: the tokens of transformers' own generate, prompts of all lengths."""
    model, config = build(name)
    lengths = np.array([66, 2, 33])
    left = np.zeros((B, S), int)
    mask = np.arange(S) >= S - lengths[:, None]
    for row, tokens, n in zip(left, TOKENS, lengths, strict=True):
        row[S - n :] = tokens[:n]
    want = model.generate(
        input_ids=torch.tensor(left), attention_mask=torch.tensor(mask).long(), max_new_tokens=10, do_sample=False,
        pad_token_id=0, eos_token_id=None,
    )[:, S:]  # fmt: skip
    declared, mesh = qwen3_5.declare(config), make_mesh()
    live = layout.place(declared, mesh, layout.fill(declared, values(arrays(model), config)))
    got, _ = generate(declared, mesh)(live, TOKENS, lengths, max_new_tokens=10)
    assert np.asarray(got).tolist() == want.tolist()
