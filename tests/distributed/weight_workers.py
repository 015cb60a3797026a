"""What each process runs in the tests of quantized weights and adapters over several processes."""

import numpy as np

from shardzoo import checkpoints
from shardzoo.zoo import adapters, quantize
from shardzoo.zoo.adapters import Adapter, Factors
from shardzoo.zoo.linears import linear_layers
from shardzoo.zoo.mesh import make_mesh


def style(declared):
    """An adapter of the same random factors on every process."""
    rng = np.random.default_rng(0)
    factors = {}
    for path, layer in linear_layers(declared).items():
        lora = adapters.declare_lora(layer, 2, np.float32)
        a, b = (rng.normal(size=s).astype(np.float32) for s in (lora.a.shape, lora.b.shape))
        factors[path] = Factors(a=a, b=b, ratio=np.full(lora.ratio.shape, 0.5, np.float32))
    return Adapter(name="style", strength=0.7, factors=factors)


def quantize_attach_save(path, to, degrees, kind):
    """Quantizes while restoring, attaches an adapter and saves; the checksums of what was saved."""
    ckpt, mesh = checkpoints.open(path), make_mesh(**degrees)
    declared = ckpt.declared if kind is None else quantize.declare(ckpt.declared, kind)
    model = checkpoints.restore(ckpt, mesh, quantize=kind)
    declared, model = adapters.attach(declared, model, mesh, [style(declared)])
    model = adapters.set_strengths(model, {"style": 0.25})
    if kind is None:
        declared, model = adapters.merge(declared, model)
    checkpoints.save(to, model, declared, timeout=60.0)
    return checkpoints.checksum(model, timeout=60.0)
