"""FLUX.1 against diffusers: both members, gradients of all weights and inputs, odd sizes, half precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch_flux import build, values
from torch_values import arrays, error, rms

from shardzoo.zoo import flux, layout
from shardzoo.zoo.mesh import make_mesh

TOLERANCE = 5e-5
# name -> (changes of the config, batch, rows and columns of tokens, tokens of text)
CASES = {
    "dev_guidance": ({}, 2, (3, 4), 6),
    "schnell_no_guidance": (dict(guidance_embeds=False), 2, (3, 4), 6),
    "odd": (dict(num_layers=1, num_single_layers=3, in_channels=6, out_channels=10), 3, (5, 7), 11),
    "wide": (dict(num_attention_heads=3, attention_head_dim=22, axes_dims_rope=(2, 8, 12)), 1, (9, 2), 1),
    "narrow": (dict(joint_attention_dim=7, pooled_projection_dim=5, num_single_layers=1), 2, (1, 13), 17),
}


class Case:
    """Inputs of a case and a weight for each number of its result."""

    def __init__(self, name, rounded=False):
        changes, batch, (rows, columns), text = CASES[name]
        rng = np.random.default_rng(5)
        self.model, _, c = build(**changes)
        self.config = c
        shapes = ((batch, rows * columns, c.in_channels), (batch, text, c.text), (batch, c.pooled))
        self.given = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
        self.cotangent = rng.normal(size=(batch, rows * columns, c.out_channels)).astype(np.float32)
        self.times = rng.uniform(0, 1, batch).astype(np.float32)
        # Up to 1: PyTorch's exp is one bit off at two of 128 frequencies, which 7 makes 2e-4 in a feature's angle.
        self.guidance = rng.uniform(0, 1, batch).astype(np.float32) if c.guidance else None
        self.ids = flux.image_ids(rows, columns)
        self.text_ids = np.zeros((text, 3)) if name != "odd" else rng.integers(0, 9, (text, 3)).astype(float)
        if rounded:
            self.given = [x.astype(jnp.bfloat16).astype(np.float32) for x in self.given]
            with torch.no_grad():
                for weight in self.model.parameters():
                    weight.copy_(weight.to(torch.bfloat16).float())

    def reference(self, dtype=torch.float32):
        """The result, the gradients of its weighted sum for the weights, and those for image, text and pooled text."""
        image, text, pooled = (torch.tensor(x, dtype=dtype).requires_grad_() for x in self.given)
        model = self.model.to(dtype)
        model.zero_grad()
        guidance = None if self.guidance is None else torch.tensor(self.guidance, dtype=dtype)
        out = model(
            image, text, pooled, torch.tensor(self.times, dtype=dtype), torch.tensor(self.ids),
            torch.tensor(self.text_ids), guidance,
        ).sample  # fmt: skip
        (out.float() * torch.tensor(self.cotangent)).sum().backward()
        grads = values(arrays(model, grads=True), self.config)
        return out.detach().float().numpy(), grads, [x.grad.float() for x in (image, text, pooled)]

    def ours(self, stored=np.float32, **options):
        declared, mesh = flux.declare(self.config, stored), make_mesh()
        named = {k: v.astype(stored) for k, v in values(arrays(self.model), self.config).items()}
        model = layout.place(declared, mesh, layout.fill(declared, named))
        f = flux.forward(declared, mesh, **options)

        def total(model, *given):
            out = f(
                model, *given, self.times, image_ids=self.ids, text_ids=self.text_ids, guidance=self.guidance
            ).astype(jnp.float32)
            return jnp.sum(out * self.cotangent), out

        both = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2, 3), has_aux=True))
        (_, out), (grads, *rest) = both(model, *self.given)
        return np.asarray(out), jax.tree.map(np.asarray, layout.named(grads)), rest


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "narrow" else n for n in CASES])
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
