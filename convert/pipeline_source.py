"""Sources of several components: a diffusers folder, or the Wan repositories' own.

To add a pipeline of diffusers: name its classes in `KINDS`, and its families' rules in `convert/families`.
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardzoo.checkpoints.manifest import is_below
from shardzoo.convert.folder import is_index, is_weights, read_config
from shardzoo.convert.hub import fetch_pipeline, is_hub_address
from shardzoo.convert.model_index import MODEL_INDEX, ModelIndex, read_model_index
from shardzoo.errors import InputError, fail_if

KINDS = {  # class in model_index.json -> kind
    "FluxPipeline": "flux",
    "Flux2Pipeline": "flux2",
    "Flux2KleinPipeline": "flux2",
    "QwenImageEditPipeline": "qwen-image",
    "QwenImageEditPlusPipeline": "qwen-image",
    "QwenImagePipeline": "qwen-image",
    "WanPipeline": "wan",
    "WanImageToVideoPipeline": "wan",
}
# Class -> components that are a part of the source of another one, which carries it along besides: name -> that
# component, family, part.
_EYES = {"image_encoder": ("text_encoder", "qwen2.5-vl-vision", "visual")}
PARTS = {"QwenImageEditPipeline": _EYES, "QwenImageEditPlusPipeline": _EYES}
MAX_SMALL_BYTES = 256 << 20

_T5 = re.compile(r"models_t5.*\.(pth|safetensors)")
_CLIP = re.compile(r"models_clip.*\.(pth|safetensors)")
_VAE = re.compile(r"Wan2\.(?P<minor>\d)_VAE\.(pth|safetensors)")
_DIT = re.compile(r"diffusion_pytorch_model.*\.(safetensors|bin)")
_EXPERTS = {"transformer": "high_noise_model", "transformer_2": "low_noise_model"}
_TOKENIZER = "google/umt5-xxl"
_NO_WEIGHTS = re.compile("Scheduler|Tokenizer|Processor|FeatureExtractor")  # in the class of what is no model


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineSource:
    """A folder of components, by name.

    Attributes:
        root: the folder.
        kind, layout: as in `checkpoints.pipeline.Pipeline`.
        components: name -> where it is below the root, a folder or a file; "." is the root itself.
        files: small files to carry along, below the root.
        settings: what its own config files say.
        reading: how to read a component that is a part of another one's source, as `convert` takes it.
        notes: remarks for the user.
    """

    root: Path
    kind: str
    layout: str
    components: Mapping[str, str]
    files: tuple[str, ...]
    settings: Mapping[str, Any]
    reading: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self):
        places = [*self.files, *(place for place in self.components.values() if place != ".")]
        fail_if(
            [f"{place!r}: is not the plain name of a file: rename it" for place in places
             if not (is_below(place) and place.isprintable())],
            f"{self.root}: names cannot be kept",
        )  # fmt: skip

    def path(self, name: str) -> Path:
        """What to give to `convert` for a component."""
        place = self.root / self.components[name]
        if self.components[name] != ".":
            return place
        # Other components lie beside it: the files are named one by one.
        names = sorted(p.name for p in place.iterdir() if p.name.startswith("diffusion_pytorch_model"))
        index = next((n for n in names if is_index(n)), None)
        return place / (index or names[0])

    def pick(self, names: tuple[str, ...]) -> list[str]:
        """The components asked for, in the pipeline's order; all of them if none is named.

        Raises:
            InputError: one is not there.
        """
        absent = [name for name in names if name not in self.components]
        if absent:
            raise InputError(
                f"{self.root}: component={absent[0]!r} is not in this {self.layout} folder of a {self.kind} pipeline:"
                f" use any of {', '.join(self.components)}"
            )
        return [name for name in self.components if not names or name in names]


def find_pipeline(src: str | Path, *, variant: str | None = None) -> PipelineSource | None:
    """The pipeline that a folder holds, or None where it is a source of one model.

    Of a repository on the hub every component of a diffusers pipeline is downloaded; `variant` chooses among twins.

    Raises:
        InputError: a pipeline that this zoo does not run, or one whose folder is not whole.
    """
    if is_hub_address(str(src)):
        fetched = fetch_pipeline(str(src), variant=variant)
        if fetched is None:
            return None
        found = _diffusers(fetched.folder)
        return dataclasses.replace(found, settings={**found.settings, "hub": dataclasses.asdict(fetched.origin)})
    root = Path(src)
    if not root.is_dir():
        return None
    return _diffusers(root) if (root / MODEL_INDEX).is_file() else _wan(root)


def _diffusers(root: Path) -> PipelineSource:
    index = read_model_index(root / MODEL_INDEX, lambda name: _has_weights(root / name))
    name, listed = index.pipeline, index.classes
    if not isinstance(name, str) or name not in KINDS:
        raise InputError(
            f"{root}: {MODEL_INDEX} is of {name!r:.100}, and the pipelines converted whole are {', '.join(KINDS)}:"
            " give one of its component folders"
        )
    components = {key: key for key in listed if _has_weights(root / key)}
    gone = [f"{key}: {MODEL_INDEX} names it, and there is no such folder: fetch it" for key in listed
            if not (root / key).is_dir()]  # fmt: skip
    gone += [f"{key}: there are no weights in its folder: fetch them" for key in listed
             if (root / key).is_dir() and key not in components and not _NO_WEIGHTS.search(listed[key])]  # fmt: skip
    fail_if(gone, f"{root}: components are missing")
    small = [f"{key}/{name}" for key in listed if key not in components for name in _small(root / key)]
    settings = {"_class_name": name, **index.options, "scheduler": _scheduler(root)}
    parts = {key: part for key, part in PARTS.get(name, {}).items() if part[0] in components}
    return PipelineSource(
        root=root,
        kind=KINDS[name],
        layout="diffusers",
        components=components | {key: whole for key, (whole, *_) in parts.items()},
        reading={key: {"family": family, "component": part} for key, (_, family, part) in parts.items()},
        files=(MODEL_INDEX, *small),
        settings=settings,
        notes=tuple(_unread(root, index)),
    )


def _unread(root: Path, index: ModelIndex) -> Iterator[str]:
    """Folders of weights that are no component."""
    for folder in sorted(root.iterdir()):
        if folder.name not in index.classes and not folder.name.startswith(".") and _has_weights(folder):
            why = "leaves it out by [null, null]" if folder.name in index.left_out else "does not name it"
            yield f"{folder.name}: holds weights and was not converted: {MODEL_INDEX} {why}"


def _scheduler(root: Path) -> dict[str, Any]:
    path = root / "scheduler" / "scheduler_config.json"
    if not path.is_file():
        raise InputError(f"{path}: is missing: fetch it")
    return read_config(path)[1]


def _has_weights(folder: Path) -> bool:
    return folder.is_dir() and any(is_weights(path.name) or is_index(path.name) for path in folder.iterdir())


def _small(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_file() and p.stat().st_size <= MAX_SMALL_BYTES)


def _wan(root: Path) -> PipelineSource | None:
    """The folder that the Wan repositories read, where a transformer and at least one other component lie in it."""
    names = sorted(path.name for path in root.iterdir())
    components = {key: folder for key, folder in _EXPERTS.items() if folder in names}
    if not components and any(_DIT.fullmatch(name) for name in names):
        components = {"transformer": "."}
    others = {"text_encoder": _T5, "image_encoder": _CLIP, "vae": _VAE}
    for key, pattern in others.items():
        found = [name for name in names if pattern.fullmatch(name)]
        if len(found) > 1:
            raise InputError(f"{root}: holds {' and '.join(found)}, each for {key}: leave one of them there")
        if found:
            components[key] = found[0]
    if "transformer" not in components or not set(components) & set(others):
        return None
    tokenizer = [f"{_TOKENIZER}/{name}" for name in _small(root / _TOKENIZER)] if (root / _TOKENIZER).is_dir() else []
    return PipelineSource(
        root=root,
        kind="wan",
        layout="original",
        components=components,
        files=tuple(tokenizer),
        settings=_wan_settings(root, components),
    )


def _wan_settings(root: Path, components: Mapping[str, str]) -> dict[str, Any]:
    """What diffusers' config files would say: in the Wan repositories it stands in the code, by task.

    Boundaries and shifts are those of `wan/configs` there.
    """
    experts = "transformer_2" in components
    conditioned = experts and _channels(root / components["transformer"] / "config.json") == 36
    match = _VAE.fullmatch(components.get("vae", ""))
    return {
        "_class_name": "WanImageToVideoPipeline" if conditioned or "image_encoder" in components else "WanPipeline",
        "boundary_ratio": (0.9 if conditioned else 0.875) if experts else None,
        "expand_timesteps": match is not None and match["minor"] == "2",
        "scheduler": {
            "_class_name": "UniPCMultistepScheduler",
            "num_train_timesteps": 1000,
            "prediction_type": "flow_prediction",
            "use_flow_sigmas": True,
            "flow_shift": 12.0 if experts and not conditioned else 5.0,
            "solver_order": 2,
        },
    }


def _channels(config: Path) -> int | None:
    return read_config(config)[1].get("in_dim") if config.is_file() else None


def diffusers_files(kind: str, components: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, bytes]:
    """What a diffusers folder holds beside its components and tokenizer, for a pipeline that came in another layout."""
    assert kind == "wan", kind
    image, none = "image_encoder" in components, [None, None]
    index = {
        "_class_name": settings["_class_name"],
        "boundary_ratio": settings["boundary_ratio"],
        "expand_timesteps": settings["expand_timesteps"],
        "scheduler": ["diffusers", settings["scheduler"]["_class_name"]],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": ["diffusers", "WanTransformer3DModel"] if "transformer_2" in components else none,
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    files = {"scheduler/scheduler_config.json": settings["scheduler"]}
    if settings["_class_name"] == "WanImageToVideoPipeline":
        index["image_encoder"] = ["transformers", "CLIPVisionModel"] if image else none
        index["image_processor"] = ["transformers", "CLIPImageProcessor"] if image else none
    if image:
        files["image_processor/preprocessor_config.json"] = {"image_processor_type": "CLIPImageProcessor"}
    return {
        name: (json.dumps(content, indent=2) + "\n").encode() for name, content in {MODEL_INDEX: index, **files}.items()
    }
