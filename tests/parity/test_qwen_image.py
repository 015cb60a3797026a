"""Qwen-Image against diffusers: all variants, gradients of all weights and inputs, masks, odd sizes, half precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch_qwen_image import build, values
from torch_values import arrays, error, rms

from shardzoo.zoo import layout, qwen_image
from shardzoo.zoo.mesh import make_mesh

TOLERANCE = 5e-5
LAYERED = dict(use_layer3d_rope=True, use_additional_t_cond=True)
# name -> (changes of the config, batch, grids of the images, mask of the text: lengths or rows of 0 and 1)
CASES = {
    "text_mask": ({}, 2, ((1, 3, 4),), (6, 4)),
    "edit": (dict(zero_cond_t=True), 1, ((1, 3, 4), (1, 2, 2)), (6,)),
    "layered": (LAYERED, 1, ((1, 3, 4),) * 3, (6,)),
    "odd": (dict(num_layers=3, in_channels=6, out_channels=3), 3, ((1, 5, 7),), (11, 1, 8)),
    "edit_wide": (
        dict(num_attention_heads=3, attention_head_dim=22, axes_dims_rope=(2, 8, 12), zero_cond_t=True),
        2,
        ((1, 9, 2), (1, 3, 5), (1, 1, 7)),
        ((1, 0, 1, 0, 0, 1, 0), (0, 1, 1, 1, 1, 1, 1)),
    ),
    "layered_batch": ({**LAYERED, "joint_attention_dim": 7, "num_layers": 1}, 2, ((1, 1, 13),) * 4 + ((1, 2, 3),), ()),
    "references": ({}, 2, ((1, 4, 3), (2, 5, 2)), ()),  # of a model that sees them as it sees its own image
}
SLOW = ("edit", "odd", "layered_batch", "references")


def mask_of(given):
    """The mask of the text [batch, text] and its length; None where there is none."""
    if not given:
        return None, 5
    rows = [(1,) * n + (0,) * (max(given) - n) for n in given] if isinstance(given[0], int) else given
    return np.array(rows, bool), len(rows[0])


class Case:
    """Inputs of a case and a weight for each number of its result."""

    def __init__(self, name, rounded=False):
        changes, batch, self.grids, mask = CASES[name]
        rng = np.random.default_rng(5)
        self.model, _, c = build(**changes)
        self.config = c
        self.mask, text = mask_of(mask)
        seq = sum(int(np.prod(grid)) for grid in self.grids)
        self.given = [
            rng.normal(size=s).astype(np.float32) for s in ((batch, seq, c.in_channels), (batch, text, c.text))
        ]
        self.cotangent = rng.normal(size=(batch, seq, c.out_channels)).astype(np.float32)
        self.times = rng.uniform(0, 1, batch).astype(np.float32)
        self.kinds = rng.integers(0, 2, batch) if c.added_cond else None
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
        out = model(
            hidden_states=image, encoder_hidden_states=text, timestep=torch.tensor(self.times, dtype=dtype),
            encoder_hidden_states_mask=None if self.mask is None else torch.tensor(self.mask),
            img_shapes=[list(self.grids)] * len(self.times),
            additional_t_cond=None if self.kinds is None else torch.tensor(self.kinds),
        ).sample  # fmt: skip
        (out.float() * torch.tensor(self.cotangent)).sum().backward()
        grads = values(arrays(model, grads=True), self.config)
        return out.detach().float().numpy(), grads, [x.grad.float() for x in (image, text)]

    def ours(self, stored=np.float32, gradients=True, **options):
        declared, mesh = qwen_image.declare(self.config, stored), make_mesh()
        named = {k: v.astype(stored) for k, v in values(arrays(self.model), self.config).items()}
        model = layout.place(declared, mesh, layout.fill(declared, named))
        f = qwen_image.forward(declared, mesh, **options)

        def total(model, *given):
            out = f(model, *given, self.times, grids=self.grids, text_mask=self.mask, kinds=self.kinds)
            return jnp.sum(out.astype(jnp.float32) * self.cotangent), out

        if not gradients:
            return np.asarray(jax.jit(total)(model, *self.given)[1])
        both = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))
        (_, out), (grads, *rest) = both(model, *self.given)
        return np.asarray(out, np.float32), jax.tree.map(np.asarray, layout.named(grads)), rest


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


def test_bfloat16():
    """By root mean square, at most 1.25 times as far from the reference in float32 as the reference in bfloat16 is."""
    case = Case("odd", rounded=True)
    exact, *_ = case.reference()
    got, grads, _ = case.ours(jnp.bfloat16)
    mixed = case.ours(jnp.bfloat16, gradients=False, dtype=jnp.float32)
    half, *_ = case.reference(torch.bfloat16)
    assert rms(got - exact) <= 1.25 * rms(half - exact)
    assert error(mixed, exact) <= TOLERANCE
    assert all(np.isfinite(g.astype(np.float32)).all() for g in grads.values())
