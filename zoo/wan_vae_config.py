"""Sizes of the video autoencoders of Wan2.1 and Wan2.2, and how they come about level by level."""

import dataclasses
from collections.abc import Iterator

from shardzoo.errors import fail_if


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and variants.

    Attributes:
        latent_channels: channels of a latent frame.
        width, decoder_width: channels of the encoder's first level and of the decoder's last.
        multipliers: of the width, level by level from the pixels on; each level but the last halves height and width.
        blocks: residual blocks of an encoder's level; a decoder's has one more.
        halve_time: for each level but the last, whether it halves the number of frames too.
        shortcuts: means and repetitions of pixels round each level (Wan2.2).
        patch: height and width of the patches of pixels that the network takes as channels (Wan2.2: 2).
        channels: of the video.
        latent_mean, latent_std: what normalised latents are counted from and in, one number a latent channel.
    """

    latent_channels: int
    width: int
    decoder_width: int
    multipliers: tuple[int, ...] = (1, 2, 4, 4)
    blocks: int = 2
    halve_time: tuple[bool, ...] = (False, True, True)
    shortcuts: bool = False
    patch: int = 1
    channels: int = 3
    latent_mean: tuple[float, ...]
    latent_std: tuple[float, ...]

    def __post_init__(self):
        sizes = ("latent_channels", "width", "decoder_width", "blocks", "patch", "channels")
        problems = [f"{n}={getattr(self, n)} is not at least 1: change it" for n in sizes if getattr(self, n) < 1]
        if not self.multipliers or min(self.multipliers) < 1:
            problems.append(f"multipliers={self.multipliers} are not at least one number of at least 1: change them")
        if len(self.halve_time) != len(self.multipliers) - 1:
            given, need = len(self.halve_time), len(self.multipliers) - 1
            problems.append(f"halve_time has {given} entries where {need} levels are halved: give one for each")
        if sum(self.halve_time) > 2:
            problems.append(
                f"halve_time={self.halve_time} halves more than twice: frames come by four, use two at most"
            )
        for name in ("latent_mean", "latent_std"):
            if len(getattr(self, name)) != self.latent_channels:
                given = len(getattr(self, name))
                problems.append(f"{name} has {given} numbers for latent_channels={self.latent_channels}: give as many")
        if any(not value > 0 for value in self.latent_std):
            problems.append("latent_std holds a number that is not above 0: change it")
        fail_if(problems or [*self._width_problems()], "wan_vae config")

    def _width_problems(self) -> Iterator[str]:
        if not self.shortcuts:
            if any(self.decoder_width * m % 2 for m in self.multipliers[1:]):
                yield f"decoder_width={self.decoder_width} gives odd widths, which upsampling halves: use an even one"
            return
        for name, levels in (("width", self.down_levels), ("decoder_width", self.up_levels)):
            for level in levels:
                many, few = (level.into, level.out) if name == "width" else (level.out, level.into)
                factor = level.time_factor * level.space_factor**2
                if many * factor % few and (level.change or name == "width"):
                    yield (
                        f"{name}={getattr(self, name)}: a shortcut's {many} x {factor} do not divide by {few}"
                        f" channels: change multipliers={self.multipliers}"
                    )

    @property
    def down_levels(self) -> tuple["Level", ...]:
        """The encoder's levels, pixels first."""
        outs = [self.width * m for m in self.multipliers]
        return self._levels([self.width, *outs[:-1]], outs, self.halve_time)

    @property
    def up_levels(self) -> tuple["Level", ...]:
        """The decoder's levels, latents first. Without shortcuts upsampling halves the width for the next level."""
        outs = [self.decoder_width * m for m in self.multipliers[::-1]]
        after = outs[:-1] if self.shortcuts else [out // 2 for out in outs[:-1]]
        return self._levels([outs[0], *after], outs, self.halve_time[::-1])

    def _levels(self, intos: list[int], outs: list[int], halve_time: tuple[bool, ...]) -> tuple["Level", ...]:
        last = len(outs) - 1
        changes = zip(intos, outs, (*halve_time, False), strict=True)
        return tuple(
            Level(into=into, out=out, change=i < last, halve_time=time) for i, (into, out, time) in enumerate(changes)
        )

    @property
    def time_factor(self) -> int:
        """Frames of a latent frame, but for the first."""
        return 2 ** sum(self.halve_time)

    @property
    def net_factor(self) -> int:
        """Rows of the network's input in a latent row."""
        return 2 ** len(self.halve_time)

    @property
    def space_factor(self) -> int:
        """Rows of pixels in a latent row."""
        return self.net_factor * self.patch

    @property
    def net_channels(self) -> int:
        return self.channels * self.patch**2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Level:
    """One level: its blocks go from `into` to `out` channels; with `change` a resampling follows."""

    into: int
    out: int
    change: bool
    halve_time: bool

    @property
    def time_factor(self) -> int:
        return 2 if self.halve_time else 1

    @property
    def space_factor(self) -> int:
        return 2 if self.change else 1


# Of the latents; from the source, where they are the class's defaults (2.1) and part of the published config (2.2).
MEAN_21 = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508, 0.4134, -0.0715, 0.5517, -0.3632, -0.1922,
    -0.9497, 0.2503, -0.2921,
)  # fmt: skip
STD_21 = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253,
    2.8251, 1.916,
)  # fmt: skip
MEAN_22 = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891, 0.157,
    -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502, -0.2055, -0.0322,
    0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.123, -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.052,
    0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
)  # fmt: skip
STD_22 = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.499, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165,
    0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659, 0.7069, 0.5338, 0.4889, 0.4917,
    0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.06,
    0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)  # fmt: skip

PRESETS = {
    "wan2.1-vae": Config(
        latent_channels=16, width=96, decoder_width=96, latent_mean=MEAN_21, latent_std=STD_21
    ),
    "wan2.2-vae": Config(
        latent_channels=48, width=160, decoder_width=256, shortcuts=True, patch=2, latent_mean=MEAN_22,
        latent_std=STD_22,
    ),
}  # fmt: skip
PRESETS["qwen-image-vae"] = PRESETS["wan2.1-vae"]  # the same sizes and statistics, other weights; one frame
