"""The models, and what makes a mesh for them.

mesh = zoo.make_mesh(context=2, tensor=3)
f = zoo.decoder.forward(declared, mesh)
"""

from shardzoo.zoo import clip_vision, decoder, sampling, t5, wan, wan_pipeline, wan_vae
from shardzoo.zoo.families import FAMILIES, find_family, find_preset
from shardzoo.zoo.mesh import Degrees, make_mesh

__all__ = [
    "FAMILIES",
    "Degrees",
    "clip_vision",
    "decoder",
    "find_family",
    "find_preset",
    "make_mesh",
    "sampling",
    "t5",
    "wan",
    "wan_pipeline",
    "wan_vae",
]
