"""The models, and what makes a mesh for them.

mesh = zoo.make_mesh(context=2, tensor=3)
f = zoo.decoder.forward(declared, mesh)
"""

import importlib
from typing import TYPE_CHECKING, Any

from shardzoo.zoo.families import family_names, find_family, find_preset
from shardzoo.zoo.mesh import Degrees, make_mesh

if TYPE_CHECKING:
    from shardzoo.zoo import (
        adapters,
        clip_text,
        clip_vision,
        costs,
        decoder,
        flux,
        flux2,
        flux2_pipeline,
        flux_pipeline,
        image_vae,
        layout,
        losses,
        measure,
        optimizer_state,
        pipeline,
        quantize,
        qwen2_5_vl,
        qwen3_5,
        qwen3_5_vision,
        qwen_image,
        qwen_image_pipeline,
        sampling,
        t5,
        training,
        wan,
        wan_pipeline,
        wan_vae,
    )

__all__ = [
    "Degrees",
    "adapters",
    "clip_text",
    "clip_vision",
    "costs",
    "decoder",
    "family_names",
    "find_family",
    "find_preset",
    "flux",
    "flux2",
    "flux2_pipeline",
    "flux_pipeline",
    "image_vae",
    "layout",
    "losses",
    "make_mesh",
    "measure",
    "optimizer_state",
    "pipeline",
    "quantize",
    "qwen2_5_vl",
    "qwen3_5",
    "qwen3_5_vision",
    "qwen_image",
    "qwen_image_pipeline",
    "sampling",
    "t5",
    "training",
    "wan",
    "wan_pipeline",
    "wan_vae",
]


def __getattr__(name: str) -> Any:
    """A module of a family, imported when it is first asked for."""
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
