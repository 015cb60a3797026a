"""Wan against diffusers: every kind of member, gradients of all weights and inputs, odd sizes, half precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch_values import arrays, error, rms
from torch_wan import IMAGE, build, values

from shardzoo.zoo import layout, wan
from shardzoo.zoo.mesh import make_mesh
from shardzoo.zoo.wan import Timesteps

TOLERANCE = 5e-5
FLF = dict(**IMAGE, pos_embed_seq_len=10)
# name -> (changes of the config, shape of the latents, timesteps, tokens of text, images a row)
CASES = {
    "t2v": ({}, (2, 4, 3, 8, 12), [999, 250], 7, 0),
    "i2v_clip": (IMAGE, (1, 12, 3, 8, 12), [500], 512, 1),
    "flf2v_pos_embed": (FLF, (1, 12, 3, 8, 12), [500], 512, 2),
    "ti2v_per_token_timestep": (dict(in_channels=6, out_channels=6), (2, 6, 2, 8, 8), "token", 9, 0),
    "a14b_t2v_expert": ({}, (1, 4, 3, 8, 8), [901], 7, 0),
    "a14b_i2v_expert": (dict(in_channels=12), (1, 12, 3, 8, 8), [901], 7, 0),
    # odd frames, height and width in patches; odd batch; timesteps that are no whole numbers
    "odd": (dict(num_layers=3, ffn_dim=70, freq_dim=20), (3, 4, 5, 6, 14), [0.0, 333.25, 1000.0], 11, 0),
    "long patch": (dict(patch_size=(2, 1, 3), out_channels=3, attention_head_dim=22), (2, 4, 6, 3, 9), [7, 80], 5, 0),
    "images": (dict(**FLF, num_attention_heads=2, attention_head_dim=32), (3, 12, 1, 10, 6), [3, 50, 999], 512, 2),
    "few timesteps": (dict(in_channels=6, out_channels=6, text_dim=9), (2, 6, 3, 10, 6), "few", 3, 0),
}
SLOW = ("a14b_t2v_expert", "a14b_i2v_expert", "images", "i2v_clip", "ti2v_per_token_timestep", "long patch")


class Case:
    """Inputs of a case and a weight for each number of its result."""

    def __init__(self, name, rounded=False):
        self.changes, shape, times, text, images = CASES[name]
        rng = np.random.default_rng(5)
        self.model, _, self.config = build(**self.changes)
        patch, batch = self.config.patch, shape[0]
        tokens = int(np.prod([n // p for n, p in zip(shape[2:], patch, strict=True)]))
        self.latents = rng.normal(size=shape).astype(np.float32)
        self.text = rng.normal(size=(batch, text, self.config.text)).astype(np.float32)
        self.image = rng.normal(size=(batch * images, 5, 20)).astype(np.float32) if images else None
        self.cotangent = rng.normal(size=(batch, self.config.out_channels, *shape[2:])).astype(np.float32)
        self.times = self.theirs = (
            np.array(times) if isinstance(times, list) else rng.integers(0, 1000, (batch, tokens))
        )
        if times == "few":
            self.times = Timesteps(rng.integers(0, 1000, (batch, 3)), rng.integers(0, 3, (batch, tokens)))
            self.theirs = np.take_along_axis(*self.times, axis=1)
        if rounded:
            self.latents, self.text, self.image = (
                None if x is None else x.astype(jnp.bfloat16).astype(np.float32)
                for x in (self.latents, self.text, self.image)
            )
            with torch.no_grad():
                for weight in self.model.parameters():
                    weight.copy_(weight.to(torch.bfloat16).float())

    def reference(self, dtype=torch.float32):
        """The result, the gradients of its weighted sum for the weights, and those for latents, text and image."""
        given = [None if x is None else torch.tensor(x, dtype=dtype) for x in (self.latents, self.text, self.image)]
        leaves = [x.requires_grad_() for x in given if x is not None]
        latents, text, image = given
        model = halved(self.model) if dtype == torch.bfloat16 else self.model
        model.zero_grad()
        out = model(latents, torch.tensor(self.theirs), text, encoder_hidden_states_image=image).sample
        (out.float() * torch.tensor(self.cotangent)).sum().backward()
        return out.detach().float().numpy(), values(arrays(model, grads=True), self.config), [x.grad for x in leaves]

    def ours(self, stored=np.float32, **options):
        declared, mesh = wan.declare(self.config, stored), make_mesh()
        named = {k: v.astype(stored) for k, v in values(arrays(self.model), self.config).items()}
        model = layout.place(declared, mesh, layout.fill(declared, named))
        f = wan.forward(declared, mesh, **options)

        def total(model, latents, text, image):
            out = f(model, latents, self.times, text=text, image=image)
            return jnp.sum(out * self.cotangent), out

        wanted = (0, 1, 2) if self.image is None else (0, 1, 2, 3)
        both = jax.jit(jax.value_and_grad(total, argnums=wanted, has_aux=True))
        (_, out), (grads, *rest) = both(model, self.latents, self.text, self.image)
        return np.asarray(out), jax.tree.map(np.asarray, layout.named(grads)), rest


def halved(model):
    """The model in bfloat16, but for what diffusers keeps in float32 when it loads one."""
    for name, module in model.named_modules():
        if not any(part in type(model)._keep_in_fp32_modules for part in name.split(".")):
            for own in module.parameters(recurse=False):
                own.data = own.data.to(torch.bfloat16)
    model.scale_shift_table.data = model.scale_shift_table.data.float()
    for block in model.blocks:
        block.scale_shift_table.data = block.scale_shift_table.data.float()
    return model


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES])
def test_float32(name):
    case = Case(name)
    want, want_grads, want_inputs = case.reference()
    got, grads, inputs = case.ours()
    assert got.shape == want.shape and error(got, want) <= TOLERANCE
    assert grads.keys() == want_grads.keys()
    for path, grad in grads.items():
        assert error(grad, want_grads[path]) <= TOLERANCE, path
    for one, other in zip(inputs, want_inputs, strict=True):
        assert error(one, other) <= TOLERANCE


@pytest.mark.parametrize("name", ["odd", pytest.param("flf2v_pos_embed", marks=pytest.mark.slow)])
def test_bfloat16(name):
    """By root mean square, at most 1.25 times as far from the reference in float32 as the reference in bfloat16 is."""
    case = Case(name, rounded=True)
    exact, *_ = case.reference()
    got, grads, _ = case.ours(jnp.bfloat16)
    mixed, *_ = case.ours(jnp.bfloat16, dtype=jnp.float32)
    half, *_ = case.reference(torch.bfloat16)
    assert rms(got - exact) <= 1.25 * rms(half - exact)
    assert error(mixed, exact) <= TOLERANCE
    assert all(np.isfinite(g.astype(np.float32)).all() for g in grads.values())


@pytest.mark.parametrize("name", ["t2v", pytest.param("flf2v_pos_embed", marks=pytest.mark.slow)])
def test_keys_made_once_give_the_same(name):
    case = Case(name)
    declared, mesh = wan.declare(case.config), make_mesh()
    model = layout.place(declared, mesh, layout.fill(declared, values(arrays(case.model), case.config)))
    want, *_ = case.reference()
    context = jax.jit(wan.context(declared, mesh))(model, case.text, case.image)
    got = jax.jit(wan.forward(declared, mesh))(model, case.latents, case.times, context=context)
    assert error(got, want) <= TOLERANCE


def test_text_is_padded_with_zeros():
    rng = np.random.default_rng(0)
    text = rng.normal(size=(2, 9, 4)).astype(np.float32)
    padded = np.asarray(wan.padded_text(text, np.array([9, 3])))
    assert padded.shape == (2, 512, 4)
    np.testing.assert_array_equal(padded[0, :9], text[0])
    np.testing.assert_array_equal(padded[1, :3], text[1, :3])
    assert not padded[0, 9:].any() and not padded[1, 3:].any()
