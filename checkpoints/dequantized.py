"""A checkpoint of quantized weights as one of plain weights: what export reads when asked to dequantize."""

import dataclasses as dc

import numpy as np
from jaxtyping import Shaped

from shardzoo.checkpoints.checkpoint import Checkpoint
from shardzoo.checkpoints.forms import quantized_leaves
from shardzoo.checkpoints.grid import Block
from shardzoo.checkpoints.manifest import Leaf
from shardzoo.zoo.quantize import dequantize


@dc.dataclass(frozen=True)
class Dequantized(Checkpoint):
    """Reads `values * scale` for each weight that `stored` holds quantized; its manifest is that of plain weights."""

    stored: Checkpoint

    def read(self, path: str, at: Block | None = None) -> Shaped[np.ndarray, "..."]:
        pair = quantized_leaves(self.stored.manifest.leaves).get(path)
        if pair is None:
            return self.stored.read(path, at)
        values, scale = pair
        outputs = len(self.stored.leaf(scale).spec.shape)
        rows = None if at is None else at[:outputs]
        return dequantize(self.stored.read(values, at), self.stored.read(scale, rows), self.leaf(path).spec.dtype)


def dequantized(ckpt: Checkpoint) -> Checkpoint:
    """The view of a checkpoint with its quantized weights in the dtype of their scales.

    The files it came from no longer hold these values, so their digests are not those of an export.
    """
    pairs = quantized_leaves(ckpt.manifest.leaves)
    roots = {values: root for root, (values, _) in pairs.items()}
    scales = {scale for _, scale in pairs.values()}
    leaves: dict[str, Leaf] = {}
    for path, leaf in ckpt.manifest.leaves.items():
        if path in roots:
            dtype = ckpt.leaf(pairs[roots[path]][1]).spec.dtype
            leaves[roots[path]] = dc.replace(leaf, spec=dc.replace(leaf.spec, dtype=dtype))
        elif path not in scales:
            leaves[path] = leaf
    header = ckpt.manifest.header
    sources = tuple(dc.replace(source, sha256=None) for source in header.sources)
    manifest = dc.replace(ckpt.manifest, header=dc.replace(header, sources=sources), leaves=leaves)
    return Dequantized(path=ckpt.path, manifest=manifest, stored=ckpt)
