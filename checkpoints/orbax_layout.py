"""The small files that make a folder an Orbax checkpoint, and the zarr metadata of a leaf: bytes, nothing else.

Everything here is a function of its arguments alone, so `verify` can say what each file has to hold.
"""

from collections.abc import Iterable, Mapping

from shardzoo.checkpoints.grid import Grid, LeafSpec
from shardzoo.checkpoints.manifest import (
    CARRIED,
    FORMAT,
    MANIFEST,
    OPT_STATE,
    PARAMS,
    VERSION,
    Json,
    Manifest,
    canonical,
    sha256,
)

CHECKPOINT_METADATA = "_CHECKPOINT_METADATA"
ITEM_METADATA = "_METADATA"
MANIFEST_FILE = f"{MANIFEST}/metadata"  # the one name that both Orbax APIs read
DIGEST_FILE = f"{MANIFEST}/sha256"  # of the manifest, in a training checkpoint, whose other metadata Orbax writes
MARKS_FILE = f"{MANIFEST}/marks"  # digests of what Orbax writes last, in a training checkpoint
MARKERS = {"orbax.checkpoint": b"", "commit_success.txt": b"ok\n"}
STAGING_SUFFIX = ".orbax-checkpoint-tmp"  # what Orbax does not take for a checkpoint
_HANDLERS = "orbax.checkpoint.experimental.v1._src.handlers."


def marks(names: Iterable[str]) -> list[str]:
    """Those of the files of a training checkpoint that Orbax writes, with times of the day in them."""
    return sorted(name for name in names if name.rpartition("/")[2] in (CHECKPOINT_METADATA, *MARKERS))


def marks_file(digests: Mapping[str, str]) -> bytes:
    """Name -> sha256 of the marks."""
    return canonical(dict(digests))


def item_metadata(names: Iterable[str]) -> bytes:
    """`_METADATA` of an item with leaves at dotted `names`: untargeted loads give numpy, targeted ones jax arrays."""
    tree = {}
    for name in names:
        keys = tuple(name.split("."))
        tree[str(keys)] = {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
    return canonical(
        {
            "tree_metadata": tree,
            "use_ocdbt": False,
            "use_zarr3": True,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
    )


def checkpoint_metadata(family: str, manifest: bytes, carried: bool) -> bytes:
    """`_CHECKPOINT_METADATA`; holds the digest of the manifest, and no time, so that equal content is equal bytes."""
    items = [PARAMS, *([CARRIED] if carried else [])]
    handlers = {item: _HANDLERS + "pytree_handler.PyTreeHandler" for item in items}
    handlers[MANIFEST] = _HANDLERS + "json_handler.JsonHandler"
    return canonical(
        {
            "item_handlers": handlers,
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": 0,
            "commit_timestamp_nsecs": 0,
            "custom_metadata": {
                "format": FORMAT,
                "version": VERSION,
                "family": family,
                "manifest_sha256": sha256(manifest),
            },
        }
    )


def zarr_metadata(spec: LeafSpec, grid: Grid) -> Json:
    """zarr v3 metadata of a leaf: files of `grid.outer`, each of chunks of `grid.inner` followed by their crc32c."""
    little = {"configuration": {"endian": "little"}, "name": "bytes"}
    plain = little if spec.dtype.itemsize > 1 else {"name": "bytes"}
    sharding = {
        "chunk_shape": list(grid.inner),
        "codecs": [plain, {"name": "crc32c"}],
        "index_codecs": [little, {"name": "crc32c"}],
        "index_location": "end",
    }
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(spec.shape),
        "data_type": spec.dtype.name,
        "dimension_names": list(spec.dims),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(grid.outer)}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "fill_value": _fill_value(spec),
    }


def _fill_value(spec: LeafSpec):
    if spec.dtype.name == "bool":
        return False
    if spec.dtype.kind == "c":
        return [0.0, 0.0]
    return 0 if spec.dtype.kind in "iu" or spec.dtype.name.startswith("int") else 0.0


def zarr_bytes(spec: LeafSpec, grid: Grid) -> bytes:
    """The bytes of a leaf's `zarr.json`."""
    return canonical(zarr_metadata(spec, grid))


def leaf_names(manifest: Manifest) -> dict[str, list[str]]:
    """Item -> the names of its leaves as Orbax sees them."""
    items = {PARAMS: manifest.leaves, CARRIED: manifest.carried, OPT_STATE: manifest.opt_state}
    return {item: [leaf.folder.removeprefix(item + "/") for leaf in leaves.values()] for item, leaves in items.items()}


def metadata_files(manifest: Manifest) -> dict[str, bytes]:
    """Path -> bytes of every metadata file that follows from the leaves: those of the items and of each array."""
    files = {
        f"{item}/{ITEM_METADATA}": item_metadata(names)
        for item, names in leaf_names(manifest).items()
        if names or item == PARAMS
    }
    for leaf in manifest.all_leaves().values():
        files[f"{leaf.folder}/zarr.json"] = zarr_bytes(leaf.spec, leaf.grid)
    return files
