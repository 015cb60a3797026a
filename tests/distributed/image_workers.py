"""What each process runs in the test of images over several processes."""

from pathlib import Path

import jax
import numpy as np

from shardzoo import checkpoints
from shardzoo.checkpoints.pipeline import open_pipeline
from shardzoo.cli.tokenizers import read_tokenizer
from shardzoo.zoo.mesh import make_mesh
from shardzoo.zoo.pipelines import Components, Wanted, find_kind


def pictures(path, degrees, prompts):
    """The bytes of images of a pipeline, one component at a time on the devices."""
    pipeline, mesh = open_pipeline(Path(path)), make_mesh(**degrees)
    kind = find_kind(pipeline.kind)
    settings = kind.read_settings(pipeline.settings, "diffusers")
    declared = {name: pipeline.checkpoint(name).declared for name in pipeline.components}
    parts = Components(declared=declared, live=lambda name: checkpoints.restore(pipeline.checkpoint(name), mesh))
    wanted = Wanted(prompts=tuple(prompts), height=8, width=12, steps=1)
    request = kind.request(declared, settings, wanted, lambda name: read_tokenizer(pipeline, name))
    latents = kind.sample(parts, mesh, settings, request, key=jax.random.key(3))
    return np.concatenate(list(kind.frames(parts, mesh, latents))).tolist()
