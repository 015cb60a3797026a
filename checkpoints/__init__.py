"""Checkpoints that restore on any mesh: written by the converter or from a live model, opened by plain Orbax too."""

from shardzoo.checkpoints.checkpoint import Checkpoint, open
from shardzoo.checkpoints.grid import Grid, LeafSpec
from shardzoo.checkpoints.manifest import Leaf, Manifest, ManifestHeader, Skipped, Source
from shardzoo.checkpoints.restore import checksum, restore
from shardzoo.checkpoints.save import save
from shardzoo.checkpoints.verify import Verified, verify
from shardzoo.checkpoints.writer import CheckpointWriter, carried_path

__all__ = [
    "Checkpoint",
    "CheckpointWriter",
    "Grid",
    "Leaf",
    "LeafSpec",
    "Manifest",
    "ManifestHeader",
    "Skipped",
    "Source",
    "Verified",
    "carried_path",
    "checksum",
    "open",
    "restore",
    "save",
    "verify",
]
