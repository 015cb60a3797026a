"""Sizes of the image autoencoders of FLUX.1 and FLUX.2."""

import dataclasses

from shardzoo.errors import fail_if, not_above_zero


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and variants.

    Attributes:
        latent_channels: channels of the latents.
        widths: channels of the encoder's levels, pixels first; each level but the last halves height and width.
        decoder_widths: channels of the decoder's levels in the same order, pixels first.
        blocks: residual blocks of an encoder's level; a decoder's has one more.
        groups: that the channels of a norm fall into; they divide every width.
        attention: whether the middle of both coders has one.
        quant, post_quant: whether there is a projection of the encoder's moments, and of the decoder's latents.
        channels: of images.
        scale, shift: normalised latents are (latents - shift) * scale (FLUX.1).
        statistics: normalised latents are counted from means and in standard deviations that the checkpoint holds, for
            each channel and place in a patch (FLUX.2); scale and shift are not used then.
        statistics_eps: added to those variances.
        patch: height and width of the squares of latents that are a token of the transformer.
    """

    latent_channels: int
    widths: tuple[int, ...] = (128, 256, 512, 512)
    decoder_widths: tuple[int, ...] = (128, 256, 512, 512)
    blocks: int = 2
    groups: int = 32
    attention: bool = True
    quant: bool = False
    post_quant: bool = False
    channels: int = 3
    scale: float = 1.0
    shift: float = 0.0
    statistics: bool = False
    statistics_eps: float = 1e-4
    patch: int = 2

    def __post_init__(self):
        sizes = ("latent_channels", "blocks", "groups", "channels", "patch")
        problems = [f"{n}={getattr(self, n)} is not at least 1: change it" for n in sizes if getattr(self, n) < 1]
        for name in ("widths", "decoder_widths"):
            widths = getattr(self, name)
            if not widths or min(widths) < 1:
                problems.append(f"{name}={widths} are not at least one number of at least 1: change them")
            elif not problems and any(width % self.groups for width in widths):
                problems.append(f"{name}={widths} do not divide by groups={self.groups}: change one of them")
        if len(self.widths) != len(self.decoder_widths):
            given, need = len(self.decoder_widths), len(self.widths)
            problems.append(f"decoder_widths has {given} entries where widths has {need}: give as many")
        problems += not_above_zero(self, "statistics_eps")
        if self.scale == 0:
            problems.append("scale=0.0 leaves nothing of the latents: change it")
        fail_if(problems, "image_vae config")

    @property
    def space_factor(self) -> int:
        """Rows of pixels in a latent row."""
        return 2 ** (len(self.widths) - 1)


PRESETS = {
    "flux1-vae": Config(latent_channels=16, scale=0.3611, shift=0.1159),
    "flux2-vae": Config(latent_channels=32, quant=True, post_quant=True, statistics=True),
}
