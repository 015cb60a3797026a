"""What all comparisons with PyTorch share: harsh weights, torch names turned into values of a declaration, errors."""

import numpy as np
import torch

from shardzoo.convert.rules import expand
from shardzoo.zoo import layout


def harshen(model, *, is_norm=lambda name, weight: "norm" in name and weight.ndim == 1, is_table=lambda name: False):
    """Fills a torch model at random with no weight at a trivial value: norms about 1, biases and tables not small."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            draw = torch.randn_like(weight)
            if is_norm(name, weight):
                weight.copy_(1 + 0.5 * draw)
            elif weight.ndim == 1 or is_table(name):
                weight.copy_(0.5 * draw)
            else:
                weight.copy_(draw * weight[0].numel() ** -0.5)


def arrays(model, grads=False):
    """Torch name -> array of each parameter, or of its gradient (zero where nothing reads it)."""

    def one(p):
        value = (torch.zeros_like(p) if p.grad is None else p.grad) if grads else p.detach()
        return value.float().numpy()

    return {name: one(p) for name, p in model.named_parameters()}


def by_rules(named, declared, layouts, name="diffusers", rules=()):
    """Our paths -> arrays, from torch names -> arrays (weights, or their gradients), by the rules of a layout.

    `rules` are those of the family, for layouts that have none of their own.
    """
    params = layout.named(declared)
    found = {path: np.zeros(p.shape, np.float32) for path, p in params.items()}
    chosen = next(x for x in layouts if x.name == name)
    for piece in expand(chosen.rules or rules, params, chosen.roots):
        at = tuple(slice(*r) for r in piece.at)
        taken = named[piece.source][tuple(slice(*r) for r in piece.take)]
        found[piece.target][at] = taken.reshape(found[piece.target][at].shape)
    return found


def error(got, want):
    """The largest difference, relative to the largest wanted number."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    return np.abs(got - want).max() / max(np.abs(want).max(), 1e-30)


def rms(x):
    return np.sqrt(np.mean(np.square(x)))
