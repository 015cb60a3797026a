"""Weights that are not one array: quantized ones, ones with adapters beside them, ones still in a stack.

Each stands where a layer has its weight, in every filling of a declaration, and has the shape and dtype of the weight
that it stands for; of a live one some of the first outputs are taken as of an array. `layers.contract` multiplies by
it; layers, splits, gathering and checkpoints need know no more.
"""

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float, Shaped

from shardzoo.zoo.in_place import Stacked
from shardzoo.zoo.layout import Param

Leaf = Array | Param


class Quantized(eqx.Module):
    """values * scale: whole numbers or 8-bit floats, and one number for each output.

    The scale is of the dtype that the weight would have, and split as the outputs are.
    """

    values: Shaped[Leaf | Stacked, "*out_in"]
    scale: Float[Leaf, "*out"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def dtype(self) -> np.dtype:
        return self.scale.dtype

    def __getitem__(self, outputs: slice) -> "Quantized":
        return Quantized(values=self.values[outputs], scale=self.scale[outputs])


class Lora(eqx.Module):
    """What one adapter adds to one weight: `strength * ratio * B A`.

    A weight whose first output dim is `block` has an A and a B for each block, as its source may have had an adapter
    for each. Stacked like the weight, all four have a leading `layer` dim. A is split like the weight's inputs and B
    like its outputs, so that either product is as much split as that by the weight.

    Attributes:
        a: inputs to rank.
        b: rank to outputs.
        ratio: alpha / rank, as the adapter was trained.
        strength: how much of it is wanted.
    """

    a: Float[Leaf, "*lead_rank_in"]
    b: Float[Leaf, "*lead_out_rank"]
    ratio: Float[Leaf, "*lead"]
    strength: Float[Leaf, "*layer"]

    def of_blocks(self, blocks: slice) -> "Lora":
        """The same for some blocks of a weight that has them."""
        return Lora(a=self.a[blocks], b=self.b[blocks], ratio=self.ratio[blocks], strength=self.strength)

    def of_outputs(self, outputs: slice) -> "Lora":
        """The same for some of the first outputs of a weight without blocks."""
        return Lora(a=self.a, b=self.b[outputs], ratio=self.ratio, strength=self.strength)


class Adapted(eqx.Module):
    """A weight and, by name, the adapters beside it."""

    base: Float[Leaf | Stacked, "*out_in"] | Quantized
    lora: dict[str, Lora]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def ndim(self) -> int:
        return self.base.ndim

    @property
    def dtype(self) -> np.dtype:
        return self.base.dtype

    def __getitem__(self, outputs: slice) -> "Adapted":
        parts = {
            name: lora.of_blocks(outputs) if lora.ratio.ndim else lora.of_outputs(outputs)
            for name, lora in self.lora.items()
        }
        return Adapted(base=self.base[outputs], lora=parts)


Weight = Array | Param | Stacked | Quantized | Adapted


def declared_base(weight: Weight) -> Param:
    """The parameter that a declared weight is, or whose values it keeps: its dims, shape and split."""
    weight = weight.base if isinstance(weight, Adapted) else weight
    weight = weight.values if isinstance(weight, Quantized) else weight
    assert isinstance(weight, Param)  # of declarations only
    return weight
