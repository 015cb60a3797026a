"""What each process runs in the test of generation over several processes."""

import jax

from shardzoo import checkpoints, zoo
from shardzoo.zoo.generate import complete, stream
from shardzoo.zoo.mesh import make_mesh


def texts(path, degrees, prompts, new, temperature):
    """New tokens of each prompt: all at once, and streamed."""
    mesh = make_mesh(**degrees)
    model = checkpoints.restore(path, mesh, dtype="float32")
    declared = zoo.decoder.declare(model.config)
    options = dict(max_new_tokens=new, temperature=temperature, key=jax.random.key(3))
    whole = complete(declared, mesh, model, prompts, **options)
    streamed = [[] for _ in prompts]
    width = max(map(len, prompts))
    tokens = jax.numpy.array([p + [0] * (width - len(p)) for p in prompts])
    lengths = jax.numpy.array([len(p) for p in prompts])
    for chunk, _ in stream(declared, mesh, chunk=3)(model, tokens, lengths, **options):
        for row, more in zip(streamed, chunk.tolist(), strict=True):
            row += more
    return [whole, streamed]
