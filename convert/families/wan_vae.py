"""The video autoencoders of Wan2.1 and Wan2.2 (and Qwen-Image's), as diffusers and the authors name them.

Without shortcuts (2.1) the authors keep blocks and resamplings of all levels in one list, and diffusers does so in the
encoder; with them (2.2) both have a list for each level. Where a block stands in one list depends on the number of
blocks in a level: the layouts are for two, the published number, and others are layouts of their own.
ComfyUI's files have the authors' names.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from shardzoo.convert.families import FamilyRules, Layout
from shardzoo.convert.families.fields import malformed
from shardzoo.convert.rules import Rule
from shardzoo.convert.source import TensorInfo
from shardzoo.errors import InputError, fail_if
from shardzoo.strict_json import is_number
from shardzoo.zoo import wan_vae
from shardzoo.zoo.wan_vae import Config

LEVELS = 6  # as many as there are rules for
BLOCKS = (2, 1, 3, 4)  # in an encoder's level, the published number first
_WINDOW3 = "out channels window_frames window_rows window_columns"
_WINDOW2 = "out channels window_rows window_columns"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Names:
    """What a layout calls the parts of a block, of the middle and of the two ends of a coder."""

    norm1: str
    conv1: str
    norm2: str
    conv2: str
    shortcut: str
    conv_in: str
    middle: tuple[str, str, str]
    norm_out: str
    conv_out: str
    quant: str
    post_quant: str


_DIFFUSERS = _Names(
    norm1="norm1", conv1="conv1", norm2="norm2", conv2="conv2", shortcut="conv_shortcut",
    conv_in="conv_in", middle=("mid_block.resnets.0", "mid_block.attentions.0", "mid_block.resnets.1"),
    norm_out="norm_out", conv_out="conv_out", quant="quant_conv", post_quant="post_quant_conv",
)  # fmt: skip
_ORIGINAL = _Names(
    norm1="residual.0", conv1="residual.2", norm2="residual.3", conv2="residual.6", shortcut="shortcut",
    conv_in="conv1", middle=("middle.0", "middle.1", "middle.2"),
    norm_out="head.0", conv_out="head.2", quant="conv1", post_quant="conv2",
)  # fmt: skip


def _weights(target: str, source: str, dims: str, out: str = "out") -> list[Rule]:
    return [
        Rule(target=f"{target}.weight", source=f"{source}.weight", dims=dims),
        Rule(target=f"{target}.bias", source=f"{source}.bias", dims=out),
    ]


def _gamma(target: str, source: str, ones: int = 3) -> Rule:
    return Rule(target=f"{target}.weight", source=f"{source}.gamma", dims=" ".join(["channels"] + ["()"] * ones))


def _block(target: str, source: str, names: _Names) -> list[Rule]:
    return [
        _gamma(f"{target}.norm1", f"{source}.{names.norm1}"),
        *_weights(f"{target}.conv1", f"{source}.{names.conv1}", _WINDOW3),
        _gamma(f"{target}.norm2", f"{source}.{names.norm2}"),
        *_weights(f"{target}.conv2", f"{source}.{names.conv2}", _WINDOW3),
        *_weights(f"{target}.shortcut", f"{source}.{names.shortcut}", "out channels () () ()"),
    ]


def _resampling(target: str, source: str) -> list[Rule]:
    return [
        *_weights(f"{target}.space", f"{source}.resample.1", _WINDOW2),
        *_weights(f"{target}.time", f"{source}.time_conv", _WINDOW3),
    ]


def _ends(coder: str, names: _Names) -> list[Rule]:
    block1, attn, block2 = (f"{coder}.{name}" for name in names.middle)
    middle = f"{coder}.middle"
    return [
        *_weights(f"{coder}.conv_in", f"{coder}.{names.conv_in}", _WINDOW3),
        *_block(f"{middle}.block1", block1, names),
        _gamma(f"{middle}.attn.norm", f"{attn}.norm", ones=2),
        *_weights(f"{middle}.attn.qkv", f"{attn}.to_qkv", "(block out) channels () ()", "(block out)"),
        *_weights(f"{middle}.attn.out", f"{attn}.proj", "out channels () ()"),
        *_block(f"{middle}.block2", block2, names),
        _gamma(f"{coder}.norm", f"{coder}.{names.norm_out}"),
        *_weights(f"{coder}.conv_out", f"{coder}.{names.conv_out}", _WINDOW3),
    ]


def _rules(names: _Names, places: Mapping[str, str], blocks: int) -> tuple[Rule, ...]:
    """All rules of a layout.

    `places` has for each kind of part where it stands: `{level}` and `{i}` count levels and the parts of one, `{flat}`
    the parts of all levels, a resampling included.
    """
    rules = [
        *_weights("quant", names.quant, "out channels () () ()"),
        *_weights("post_quant", names.post_quant, "out channels () () ()"),
    ]
    for coder, resampling, count in (("encoder", "down", blocks), ("decoder", "up", blocks + 1)):
        rules += _ends(coder, names)
        for kind, inner in (("plain", ""), ("levels", ".inner")):
            for level in range(LEVELS):
                target = f"{coder}.levels.{level}{inner}"
                for i in range(count + 1):
                    part = f"{kind} {coder} {'block' if i < count else 'resampling'}"
                    source = places[part].format(level=level, i=i, flat=level * (count + 1) + i)
                    rules += (
                        _block(f"{target}.blocks.{i}", source, names)
                        if i < count
                        else _resampling(f"{target}.{resampling}", source)
                    )
    return tuple(rules)


_IN_DIFFUSERS = {
    "plain encoder block": "encoder.down_blocks.{flat}",
    "plain encoder resampling": "encoder.down_blocks.{flat}",
    "plain decoder block": "decoder.up_blocks.{level}.resnets.{i}",
    "plain decoder resampling": "decoder.up_blocks.{level}.upsamplers.0",
    "levels encoder block": "encoder.down_blocks.{level}.resnets.{i}",
    "levels encoder resampling": "encoder.down_blocks.{level}.downsampler",
    "levels decoder block": "decoder.up_blocks.{level}.resnets.{i}",
    "levels decoder resampling": "decoder.up_blocks.{level}.upsampler",
}
_IN_ORIGINAL = {
    **{f"plain encoder {part}": "encoder.downsamples.{flat}" for part in ("block", "resampling")},
    **{f"plain decoder {part}": "decoder.upsamples.{flat}" for part in ("block", "resampling")},
    **{f"levels encoder {part}": "encoder.downsamples.{level}.downsamples.{i}" for part in ("block", "resampling")},
    **{f"levels decoder {part}": "decoder.upsamples.{level}.upsamples.{i}" for part in ("block", "resampling")},
}


def _layouts() -> Iterator[Layout]:
    for blocks in BLOCKS:
        more = "" if blocks == BLOCKS[0] else f", blocks of {blocks}"

        def fits(config: Config, blocks: int = blocks) -> bool:
            return config.blocks == blocks

        yield Layout(
            name=f"diffusers{more}",
            rules=_rules(_DIFFUSERS, _IN_DIFFUSERS, blocks),
            stem="diffusion_pytorch_model",
            fits=fits,
        )
        yield Layout(name=f"original{more}", rules=_rules(_ORIGINAL, _IN_ORIGINAL, blocks), fits=fits)


LAYOUTS = tuple(_layouts())

_FIELDS: Mapping[str, tuple[str, Any]] = {  # of diffusers -> ours, and the default there
    "base_dim": ("width", 96),
    "decoder_base_dim": ("decoder_width", None),
    "z_dim": ("latent_channels", 16),
    "num_res_blocks": ("blocks", 2),
    "dim_mult": ("multipliers", (1, 2, 4, 4)),
    "temperal_downsample": ("halve_time", (False, True, True)),
    "is_residual": ("shortcuts", False),
    "patch_size": ("patch", None),
    "latents_mean": ("latent_mean", wan_vae.PRESETS["wan2.1-vae"].latent_mean),
    "latents_std": ("latent_std", wan_vae.PRESETS["wan2.1-vae"].latent_std),
}
_PLAIN = ("base_dim", "decoder_base_dim", "z_dim", "num_res_blocks", "patch_size", "in_channels", "out_channels")
_LISTS: Mapping[str, tuple[str, Any]] = {
    "dim_mult": ("whole numbers", lambda x: type(x) is int),
    "temperal_downsample": ("true and false", lambda x: type(x) is bool),
    "latents_mean": ("numbers", is_number),
    "latents_std": ("numbers", is_number),
}


def read_config(source: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Config:
    """The autoencoder that a config.json of diffusers describes, or that the tensors alone tell.

    No tensor holds the statistics of the latents: without a config those of the published models are taken, which
    their sizes tell apart.

    Raises:
        InputError: fields missing or of another kind, and what the autoencoder does not do, by name.
    """
    if not source:
        return _from_tensors(tensors)
    given = {name: default if source.get(name) is None else source[name] for name, (_, default) in _FIELDS.items()}
    inside = source.get("in_channels") or source.get("input_channels") or 3
    outside = source.get("out_channels") or inside
    problems = malformed({**source, "in_channels": inside, "out_channels": outside}, whole=_PLAIN)
    for name, (kind, fits) in _LISTS.items():
        if not (isinstance(given[name], list | tuple) and all(map(fits, given[name]))):
            problems.append(f"{name}={given[name]!r} is not a list of {kind}")
    if not problems:
        levels, blocks = len(given["dim_mult"]), given["num_res_blocks"]
        problems += [f"dim_mult has {levels} entries, and at most {LEVELS} are supported"] if levels > LEVELS else []
        problems += [] if blocks in BLOCKS else [f"num_res_blocks={blocks} is not supported: {sorted(BLOCKS)} are"]
    if type(given["is_residual"]) is not bool:
        problems.append(f"is_residual={given['is_residual']!r} is not true or false")
    if source.get("attn_scales"):
        problems.append(f"attn_scales={source['attn_scales']!r} is not supported: only none is")
    patch = given["patch_size"] or 1
    if not problems and (inside != outside or inside % patch**2):
        problems.append(f"in_channels={inside} and out_channels={outside} are not the channels of patches of {patch}")
    fail_if(problems, "config.json: not an autoencoder of Wan as this zoo runs it")
    given |= {"patch_size": patch, "decoder_base_dim": given["decoder_base_dim"] or given["base_dim"]}
    ours: dict[str, Any] = {name: given[field] for field, (name, _) in _FIELDS.items()}
    ours |= {name: tuple(value) for name, value in ours.items() if isinstance(value, list)}
    return Config(**ours, channels=inside // patch**2)


def _leaves(tensors: Mapping[str, TensorInfo]) -> tuple[dict[str, tuple[int, ...]], bool]:
    """Shapes by what leaf they are of, and whether there are shortcuts, by the layout that knows most tensors."""
    found: list[tuple[dict[str, tuple[int, ...]], bool]] = []
    for layout, shortcuts in itertools.product(LAYOUTS, (False, True)):
        rules = (r for r in layout.rules or () if ".levels." not in r.target or (".inner." in r.target) == shortcuts)
        leaves = {rule.target: tensors[rule.source].shape for rule in rules if rule.source in tensors}
        found.append(({path.replace(".inner.", "."): shape for path, shape in leaves.items()}, shortcuts))
    return max(found, key=lambda pair: len(pair[0]))


def _from_tensors(tensors: Mapping[str, TensorInfo]) -> Config:
    shapes, shortcuts = _leaves(tensors)
    blocks = [f"encoder.levels.{level}.blocks.0.conv1.weight" for level in range(LEVELS)]
    needed = ("encoder.conv_in.weight", "decoder.norm.weight", "post_quant.weight", blocks[0])
    missing = [path for path in needed if path not in shapes]
    if missing:
        raise InputError(
            "wan-vae: without a config.json the sizes come from the tensors, and these do not tell:"
            f" {', '.join(missing)}: name a config.json by config= (--config)"
        )
    width, inside = shapes["encoder.conv_in.weight"][:2]
    outs = [shapes[path][0] for path in itertools.takewhile(shapes.__contains__, blocks)]
    multipliers = tuple(out // width for out in outs)
    latent, patch = shapes["post_quant.weight"][0], math.isqrt(inside // 3) or 1
    published = [c for c in wan_vae.PRESETS.values() if (c.latent_channels, c.shortcuts) == (latent, shortcuts)]
    problems = [] if published else [f"no tensor tells latents_mean and latents_std for {latent} latent channels"]
    if inside != 3 * patch**2:
        problems.append(f"{inside} channels go into the encoder, which are not those of square patches of 3 colours")
    fail_if([f"{p}: name a config.json by config= (--config)" for p in problems], "wan-vae: no config.json")
    return Config(
        latent_channels=latent,
        width=width,
        decoder_width=shapes["decoder.norm.weight"][0] // multipliers[0],
        multipliers=multipliers,
        blocks=sum(f"encoder.levels.0.blocks.{i}.conv1.weight" in shapes for i in range(max(BLOCKS))),
        halve_time=tuple(f"encoder.levels.{i}.down.time.weight" in shapes for i in range(len(outs) - 1)),
        shortcuts=shortcuts,
        patch=patch,
        latent_mean=published[0].latent_mean,
        latent_std=published[0].latent_std,
    )


def write_config(config: Config, layout: str) -> dict[str, Any] | None:
    """config.json of diffusers; the authors' files have none."""
    if layout.startswith("original"):
        return None
    ours = {name: getattr(config, ours) for name, (ours, _) in _FIELDS.items()}
    return {
        "_class_name": "AutoencoderKLWan",
        **{name: list(value) if isinstance(value, tuple) else value for name, value in ours.items()},
        "attn_scales": [],
        "dropout": 0.0,
        "in_channels": config.net_channels,
        "out_channels": config.net_channels,
        "patch_size": None if config.patch == 1 else config.patch,
        "scale_factor_temporal": config.time_factor,
        "scale_factor_spatial": config.space_factor,
    }


FAMILY = FamilyRules(
    family="wan-vae",
    part="vae",
    layouts=LAYOUTS,
    read_config=read_config,
    config_optional=True,
    write_config=write_config,
)
