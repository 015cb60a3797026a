"""What the child processes run in the tests that kill them."""

import toy_checkpoints as toy
from fork_server import ready

from shardzoo import checkpoints

CONFIG = toy.ToyConfig(layers=4, embed=256, heads=8, kv_heads=4, head_dim=32, mlp=512, vocab=1024)


def write(path):
    """Streams a checkpoint, carrying on what an earlier child left."""
    stored = toy.values(toy.Toy.declare(CONFIG))
    leaves = toy.specs_of(toy.Toy.declare(CONFIG))
    ready()
    with checkpoints.CheckpointWriter(path, toy.header(CONFIG), leaves, "plan", budget=1 << 20) as writer:
        for name, value in stored.items():
            if name not in writer.done:
                toy.put(writer, name, value)
        writer.publish()


def save(path):
    """Saves a live model that is split over four devices."""
    import jax

    from shardzoo.zoo.layout import fill, place
    from shardzoo.zoo.mesh import make_mesh

    declared = toy.Toy.declare(CONFIG)
    model = place(declared, make_mesh(tensor=4), fill(declared, toy.values(declared)))
    jax.block_until_ready(jax.tree.leaves(model))
    ready()
    checkpoints.save(path, model, declared)
