"""The image autoencoders of FLUX.1 and FLUX.2, as diffusers and the black-forest-labs repositories name them.

Facts taken from the model files of both. The original counts the decoder's levels from the pixels, diffusers from the
latents: where a level stands depends on their number. The original's layouts are for four levels, the published number,
and others are layouts of their own. Its attention has convolutions of one pixel where diffusers has matrices.
ComfyUI's files have the original's names, at times behind a prefix.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from shardzoo.convert.families import FamilyRules, Layout
from shardzoo.convert.families.fields import malformed
from shardzoo.convert.rules import Rule
from shardzoo.convert.source import TensorInfo
from shardzoo.errors import InputError, fail_if
from shardzoo.zoo.image_vae import PRESETS, Config

LEVELS = (4, 3, 2, 5, 6, 1)  # in a coder, the published number first
BLOCKS = 5  # as many in a level as there are rules for
_WINDOW = "out channels window_rows window_columns"
_POINT, _MATRIX = "out channels () ()", "out channels"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Names:
    """What a layout calls the parts of a coder; `{level}` and `{i}` count levels and the blocks of one.

    Attributes:
        middle: first block, attention, second block.
        attn: norm, q, k, v and output of the attention.
        matrix: the dims of the attention's weights.
        down, up: the blocks of an encoder's and of a decoder's level.
        downsample, upsample: the convolutions after them.
    """

    middle: tuple[str, str, str]
    attn: tuple[str, str, str, str, str]
    matrix: str
    shortcut: str
    norm_out: str
    down: str
    up: str
    downsample: str
    upsample: str
    quant: str
    post_quant: str


_DIFFUSERS = _Names(
    middle=("mid_block.resnets.0", "mid_block.attentions.0", "mid_block.resnets.1"),
    attn=("group_norm", "to_q", "to_k", "to_v", "to_out.0"),
    matrix=_MATRIX,
    shortcut="conv_shortcut",
    norm_out="conv_norm_out",
    down="down_blocks.{level}.resnets.{i}",
    up="up_blocks.{level}.resnets.{i}",
    downsample="down_blocks.{level}.downsamplers.0.conv",
    upsample="up_blocks.{level}.upsamplers.0.conv",
    quant="quant_conv",
    post_quant="post_quant_conv",
)
_ORIGINAL = _Names(
    middle=("mid.block_1", "mid.attn_1", "mid.block_2"),
    attn=("norm", "q", "k", "v", "proj_out"),
    matrix=_POINT,
    shortcut="nin_shortcut",
    norm_out="norm_out",
    down="down.{level}.block.{i}",
    up="up.{level}.block.{i}",
    downsample="down.{level}.downsample.conv",
    upsample="up.{level}.upsample.conv",
    quant="encoder.quant_conv",
    post_quant="decoder.post_quant_conv",
)


def _layer(target: str, source: str, dims: str, block: int | None = None) -> list[Rule]:
    at = {} if block is None else {"block": block}
    return [
        Rule(target=f"{target}.weight", source=f"{source}.weight", dims=dims, at=at),
        Rule(target=f"{target}.bias", source=f"{source}.bias", dims=dims.split()[0], at=at),
    ]


def _block(target: str, source: str, names: _Names) -> list[Rule]:
    return [
        *_layer(f"{target}.norm1", f"{source}.norm1", "channels"),
        *_layer(f"{target}.conv1", f"{source}.conv1", _WINDOW),
        *_layer(f"{target}.norm2", f"{source}.norm2", "channels"),
        *_layer(f"{target}.conv2", f"{source}.conv2", _WINDOW),
        *_layer(f"{target}.shortcut", f"{source}.{names.shortcut}", _POINT),
    ]


def _middle(target: str, coder: str, names: _Names) -> list[Rule]:
    first, attn, second = (f"{coder}.{name}" for name in names.middle)
    norm, *qkv, out = (f"{attn}.{name}" for name in names.attn)
    return [
        *_block(f"{target}.block1", first, names),
        *_layer(f"{target}.attn.norm", norm, "channels"),
        *(rule for i, name in enumerate(qkv) for rule in _layer(f"{target}.attn.qkv", name, names.matrix, block=i)),
        *_layer(f"{target}.attn.out", out, names.matrix),
        *_block(f"{target}.block2", second, names),
    ]


def _coder(coder: str, names: _Names, blocks: str, change: str, places: list[int]) -> Iterator[Rule]:
    """`places` has for each of our levels which one it is in the layout."""
    yield from _layer(f"{coder}.conv_in", f"{coder}.conv_in", _WINDOW)
    yield from _middle(f"{coder}.middle", coder, names)
    yield from _layer(f"{coder}.norm", f"{coder}.{names.norm_out}", "channels")
    yield from _layer(f"{coder}.conv_out", f"{coder}.conv_out", _WINDOW)
    for ours, place in enumerate(places):
        target = f"{coder}.levels.{ours}"
        for i in range(BLOCKS):
            yield from _block(f"{target}.blocks.{i}", f"{coder}.{blocks.format(level=place, i=i)}", names)
        yield from _layer(f"{target}.change", f"{coder}.{change.format(level=place)}", _WINDOW)


def _rules(names: _Names, up: list[int]) -> tuple[Rule, ...]:
    return (
        *_coder("encoder", names, names.down, names.downsample, list(range(len(up)))),
        *_layer("quant", names.quant, _POINT),
        *_layer("post_quant", names.post_quant, _POINT),
        *_coder("decoder", names, names.up, names.upsample, up),
        Rule(target="statistics.mean", source="bn.running_mean", dims="channels"),
        Rule(target="statistics.variance", source="bn.running_var", dims="channels"),
    )


def _layouts() -> Iterator[Layout]:
    yield Layout(name="diffusers", rules=_rules(_DIFFUSERS, list(range(max(LEVELS)))), stem="diffusion_pytorch_model")
    for levels in LEVELS:
        more = "" if levels == LEVELS[0] else f", {levels} levels"

        def fits(config: Config, levels: int = levels) -> bool:
            return len(config.widths) == levels

        yield Layout(
            name=f"original{more}",
            rules=_rules(_ORIGINAL, list(range(levels))[::-1]),
            stem="ae",
            fits=fits,
        )


LAYOUTS = tuple(_layouts())
UNUSED = {r"bn\.num_batches_tracked": "a counter of training that no model reads"}

_KINDS = {"AutoencoderKL": False, "AutoencoderKLFlux2": True}  # class of diffusers -> whether it has statistics
_FIELDS = {  # of diffusers -> ours, and the defaults of the two classes
    "latent_channels": ("latent_channels", (4, 32)),
    "block_out_channels": ("widths", ((64,), (128, 256, 512, 512))),
    "decoder_block_out_channels": ("decoder_widths", (None, None)),
    "layers_per_block": ("blocks", (1, 2)),
    "norm_num_groups": ("groups", (32, 32)),
    "mid_block_add_attention": ("attention", (True, True)),
    "use_quant_conv": ("quant", (True, True)),
    "use_post_quant_conv": ("post_quant", (True, True)),
    "in_channels": ("channels", (3, 3)),
    "scaling_factor": ("scale", (0.18215, 1.0)),
    "shift_factor": ("shift", (0.0, 0.0)),
    "batch_norm_eps": ("statistics_eps", (1e-4, 1e-4)),
    "patch_size": ("patch", ((2, 2), (2, 2))),
}
_ONE_CLASS = {"scaling_factor": False, "shift_factor": False, "decoder_block_out_channels": True} | dict.fromkeys(
    ("batch_norm_eps", "patch_size"), True
)  # fields of one of the classes only, by whether it has statistics
_WHOLE = ("latent_channels", "layers_per_block", "norm_num_groups", "in_channels", "out_channels")
_FLAGS = ("mid_block_add_attention", "use_quant_conv", "use_post_quant_conv")


def read_config(source: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Config:
    """The autoencoder that a config.json of diffusers describes, or that the tensors alone tell.

    No tensor tells scale, shift and the groups of the norms: without a config those of the published models are taken,
    which their sizes tell apart.

    Raises:
        InputError: fields missing or of another kind, and what the autoencoder does not do, by name.
    """
    if not source:
        return _from_tensors(tensors)
    statistics = _KINDS.get(source.get("_class_name", "AutoencoderKL"), False)
    given = {name: _given(source, name, defaults[statistics]) for name, (_, defaults) in _FIELDS.items()}
    if given["decoder_block_out_channels"] is None:
        given["decoder_block_out_channels"] = given["block_out_channels"]
    fail_if([*_problems(source, given, statistics)], "config.json: not an image autoencoder as this zoo runs it")
    ours: dict[str, Any] = {name: given[field] for field, (name, _) in _FIELDS.items()}
    ours |= {name: tuple(ours[name]) for name in ("widths", "decoder_widths")}
    ours |= {name: float(ours[name]) for name in ("scale", "shift", "statistics_eps")}
    return Config(**{**ours, "patch": given["patch_size"][0]}, statistics=statistics)


def _given(source: Mapping[str, Any], name: str, default: Any) -> Any:
    return default if source.get(name) is None else source[name]


def _problems(source: Mapping[str, Any], given: Mapping[str, Any], statistics: bool) -> Iterator[str]:
    yield from malformed(source, whole=_WHOLE, numbers=("scaling_factor", "shift_factor", "batch_norm_eps"))
    for name in ("block_out_channels", "decoder_block_out_channels", "patch_size"):
        if not (isinstance(given[name], list | tuple) and all(type(x) is int for x in given[name])):
            yield f"{name}={given[name]!r} is not a list of whole numbers"
        elif len(given[name]) > max(LEVELS):
            yield f"{name} has {len(given[name])} entries, and at most {max(LEVELS)} are supported"
    blocks = given["layers_per_block"]
    if type(blocks) is int and blocks >= BLOCKS:  # a decoder's level has one more
        yield f"layers_per_block={blocks} is not supported: at most {BLOCKS - 1} are"
    yield from (f"{name}={given[name]!r} is not true or false" for name in _FLAGS if type(given[name]) is not bool)
    patch = given["patch_size"]
    if isinstance(patch, list | tuple) and (len(patch) != 2 or patch[0] != patch[1]):
        yield f"patch_size={patch!r} is not supported: only squares are"
    if _given(source, "out_channels", 3) != given["in_channels"]:
        yield f"out_channels={source.get('out_channels')!r} are not in_channels={given['in_channels']!r}"
    if _given(source, "act_fn", "silu") not in ("silu", "swish"):
        yield f"act_fn={source['act_fn']!r} is not supported: only 'silu' is"
    for name, kind in (("down_block_types", "DownEncoderBlock2D"), ("up_block_types", "UpDecoderBlock2D")):
        kinds = _given(source, name, [kind])
        if not (isinstance(kinds, list | tuple) and all(one == kind for one in kinds)):
            yield f"{name}={kinds!r} is not supported: only {kind!r} is"
    for name in ("latents_mean", "latents_std"):
        if source.get(name) is not None:
            yield f"{name} is not supported: only scaling_factor and shift_factor are"


_FIRST_UP = "decoder.levels.0.blocks.0.conv1.weight"  # there only in a layout of as many levels as the source has


def _from_tensors(tensors: Mapping[str, TensorInfo]) -> Config:
    """The published model of these latents, with the sizes that the tensors tell."""
    found = [{r.target: tensors[r.source].shape for r in x.rules or () if r.source in tensors} for x in LAYOUTS]
    shapes = max(found, key=lambda shapes: (len(shapes), _FIRST_UP in shapes))
    needed = ("encoder.conv_out.weight", "decoder.conv_in.weight", "encoder.levels.0.blocks.0.conv1.weight")
    missing = [path for path in needed if len(shapes.get(path, ())) != 4]
    if missing:
        raise InputError(
            "image-vae: without a config.json the sizes come from the tensors, and these do not tell:"
            f" {', '.join(missing)}: name a config.json by config= (--config)"
        )
    statistics, latents = "statistics.mean" in shapes, shapes["decoder.conv_in.weight"][1]
    preset = next((c for c in PRESETS.values() if (c.latent_channels, c.statistics) == (latents, statistics)), None)
    if preset is None:
        raise InputError(
            f"image-vae: no tensor tells scale, shift and norm groups for {latents} latent channels: name a config.json"
            " by config= (--config)"
        )
    return dataclasses.replace(
        preset,
        widths=_widths(shapes, "encoder"),
        decoder_widths=_widths(shapes, "decoder")[::-1],
        blocks=sum(f"encoder.levels.0.blocks.{i}.conv1.weight" in shapes for i in range(BLOCKS)),
        attention="encoder.middle.attn.norm.weight" in shapes,
        quant="quant.weight" in shapes,
        post_quant="post_quant.weight" in shapes,
        channels=shapes["encoder.conv_in.weight"][1],
    )


def _widths(shapes: Mapping[str, tuple[int, ...]], coder: str) -> tuple[int, ...]:
    paths = (f"{coder}.levels.{level}.blocks.0.conv1.weight" for level in range(max(LEVELS)))
    return tuple(shapes[path][0] for path in itertools.takewhile(shapes.__contains__, paths))


def write_config(config: Config, layout: str) -> dict[str, Any] | None:
    """config.json of diffusers; the original's files have none."""
    if layout.startswith("original"):
        return None
    ours = {
        name: getattr(config, ours)
        for name, (ours, _) in _FIELDS.items()
        if _ONE_CLASS.get(name, config.statistics) == config.statistics
    }
    levels = len(config.widths)
    special = {"patch_size": [config.patch] * 2} if config.statistics else {"force_upcast": True}
    return {
        "_class_name": next(name for name, statistics in _KINDS.items() if statistics == config.statistics),
        **{name: list(value) if isinstance(value, tuple) else value for name, value in ours.items()},
        **special,
        "out_channels": config.channels,
        "act_fn": "silu",
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "sample_size": 1024,
    }


FAMILY = FamilyRules(
    family="image-vae",
    part="vae",
    layouts=LAYOUTS,
    unused=UNUSED,
    read_config=read_config,
    config_optional=True,
    write_config=write_config,
)
