"""Which part of a model a parameter belongs to: the groups by which audits tell memory and work.

Families name their layers alike (`zoo/layers.py`), so the path of a parameter is enough; of a model with other names
all is "other".
"""

ENDS = {
    "embeddings": ("embed", "positions", "patches", "patch", "image", "text"),
    "head": ("head", "merger"),
}  # what a path starts with that is before or after the blocks
WITHIN = {
    "modulation": ("modulation", "conditions", "time", "pooled", "table"),
    "mlp": ("mlp", "up", "down", "gate_up"),
    "delta rule": ("delta",),
    "attention": ("attn", "cross", "mixer", "out"),
}  # what stands anywhere in a path, the first that does
CONVOLUTIONAL = ("encoder", "decoder", "quant", "post_quant")  # autoencoders: all but their attention
PARTS = ("attention", "delta rule", "mlp", "convolutions", "modulation", "embeddings", "norms", "head", "other")


def part_of(path: str) -> str:
    """The part that a parameter with this path is of, one of `PARTS`."""
    names = path.split(".")
    if names[0] in CONVOLUTIONAL and "attn" not in names:
        return "convolutions"
    if any(name in WITHIN["modulation"] for name in names):
        return "modulation"
    if any("norm" in name and name not in ("q_norm", "k_norm") for name in names):
        return "norms"
    ends = [part for part, starts in ENDS.items() if names[0] in starts]
    within = [part for part, known in WITHIN.items() if any(name in known for name in names)]
    return (ends + within + ["other"])[0]
