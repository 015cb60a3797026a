"""FLUX.2 against diffusers: dev and klein, gradients of all weights and inputs, reference images, half precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import Flux2Pipeline
from torch_flux2 import build, values
from torch_values import arrays, error, rms

from shardzoo.zoo import flux2, layout
from shardzoo.zoo.mesh import make_mesh

TOLERANCE = 5e-5
KLEIN = dict(guidance_embeds=False)
# name -> (changes of the config, batch, rows and columns of tokens, reference images, tokens of text)
CASES = {
    "dev_guidance": ({}, 2, (3, 4), (), 6),
    "klein_no_guidance": (KLEIN, 2, (3, 4), (), 6),
    "odd": (dict(num_layers=1, num_single_layers=3, in_channels=6, out_channels=10), 3, (5, 7), (), 11),
    "references": (KLEIN, 2, (2, 5), ((3, 2), (1, 4)), 7),
    "wide": (
        dict(num_attention_heads=3, attention_head_dim=22, axes_dims_rope=(2, 8, 4, 8), rope_theta=50, mlp_ratio=2.5),
        *(1, (9, 2), ((2, 2),), 1),
    ),
    "narrow": (dict(joint_attention_dim=7, timestep_guidance_channels=6, num_single_layers=1), 2, (1, 13), (), 17),
}


class Case:
    """Inputs of a case and a weight for each number of its result."""

    def __init__(self, name, rounded=False):
        changes, batch, size, references, text = CASES[name]
        rng = np.random.default_rng(5)
        self.model, _, c = build(**changes)
        self.config = c
        self.ids = flux2.image_ids(*size, references)
        seq = len(self.ids)
        self.given = [
            rng.normal(size=s).astype(np.float32) for s in ((batch, seq, c.in_channels), (batch, text, c.text))
        ]
        self.cotangent = rng.normal(size=(batch, seq, c.out_channels)).astype(np.float32)
        self.times = rng.uniform(0, 1, batch).astype(np.float32)
        # Up to 1: PyTorch's exp is one bit off at some frequencies, which 7 makes 2e-4 in a feature's angle.
        self.guidance = rng.uniform(0, 1, batch).astype(np.float32) if c.guidance else None
        self.text_ids = flux2.text_ids(text) if name != "odd" else rng.integers(0, 9, (text, 4)).astype(float)
        if rounded:
            self.given = [x.astype(jnp.bfloat16).astype(np.float32) for x in self.given]
            with torch.no_grad():
                for weight in self.model.parameters():
                    weight.copy_(weight.to(torch.bfloat16).float())

    def reference(self, dtype=torch.float32):
        """The result, the gradients of its weighted sum for the weights, and those for image and text."""
        image, text = (torch.tensor(x, dtype=dtype).requires_grad_() for x in self.given)
        model = self.model.to(dtype)
        model.zero_grad()
        guidance = None if self.guidance is None else torch.tensor(self.guidance, dtype=dtype)
        out = model(
            image, text, torch.tensor(self.times, dtype=dtype), torch.tensor(self.ids), torch.tensor(self.text_ids),
            guidance,
        ).sample  # fmt: skip
        (out.float() * torch.tensor(self.cotangent)).sum().backward()
        grads = values(arrays(model, grads=True), self.config)
        return out.detach().float().numpy(), grads, [x.grad.float() for x in (image, text)]

    def ours(self, stored=np.float32, **options):
        declared, mesh = flux2.declare(self.config, stored), make_mesh()
        named = {k: v.astype(stored) for k, v in values(arrays(self.model), self.config).items()}
        model = layout.place(declared, mesh, layout.fill(declared, named))
        f = flux2.forward(declared, mesh, **options)
        text_ids = None if np.array_equal(self.text_ids, flux2.text_ids(len(self.text_ids))) else self.text_ids

        def total(model, *given):
            out = f(model, *given, self.times, image_ids=self.ids, text_ids=text_ids, guidance=self.guidance)
            return jnp.sum(out.astype(jnp.float32) * self.cotangent), out

        both = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))
        (_, out), (grads, *rest) = both(model, *self.given)
        return np.asarray(out), jax.tree.map(np.asarray, layout.named(grads)), rest


SLOW = ("wide", "narrow")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES])
def test_result_and_gradients(name):
    case = Case(name)
    out, grads, inputs = case.ours()
    want, want_grads, want_inputs = case.reference()
    assert out.shape == want.shape and error(out, want) <= TOLERANCE
    errors = {path: error(grads[path], want) for path, want in want_grads.items()}
    assert grads.keys() == want_grads.keys() and max(errors.values()) <= TOLERANCE, errors
    for one, other in zip(inputs, want_inputs, strict=True):
        assert error(one, other) <= TOLERANCE


def test_bfloat16():
    """By root mean square, at most 1.25 times as far from the reference in float32 as the reference in bfloat16 is."""
    case = Case("odd", rounded=True)
    exact, *_ = case.reference()
    got, grads, _ = case.ours(jnp.bfloat16)
    mixed, *_ = case.ours(jnp.bfloat16, dtype=jnp.float32)
    half, *_ = case.reference(torch.bfloat16)
    assert rms(got - exact) <= 1.25 * rms(half - exact)
    assert error(mixed, exact) <= TOLERANCE
    assert all(np.isfinite(g.astype(np.float32)).all() for g in grads.values())


def test_positions_are_those_of_the_pipeline():
    """Those of text, of the image, and of reference images of several sizes."""
    latents = [torch.zeros(1, 2, *size) for size in ((4, 6), (3, 2), (1, 5), (2, 2))]
    theirs = [Flux2Pipeline._prepare_latent_ids(latents[0])[0], Flux2Pipeline._prepare_image_ids(latents[1:])[0]]
    np.testing.assert_array_equal(flux2.image_ids(4, 6, ((3, 2), (1, 5), (2, 2))), torch.cat(theirs).numpy())
    np.testing.assert_array_equal(flux2.text_ids(9), Flux2Pipeline._prepare_text_ids(torch.zeros(1, 9, 2))[0].numpy())
