"""Checkpoints that restore on any mesh: written by the converter or from a live model, opened by plain Orbax too."""

from shardzoo.checkpoints.checkpoint import Checkpoint as Checkpoint
from shardzoo.checkpoints.checkpoint import open as open
from shardzoo.checkpoints.grid import Grid as Grid
from shardzoo.checkpoints.grid import LeafSpec as LeafSpec
from shardzoo.checkpoints.manifest import Leaf as Leaf
from shardzoo.checkpoints.manifest import Manifest as Manifest
from shardzoo.checkpoints.manifest import ManifestHeader as ManifestHeader
from shardzoo.checkpoints.manifest import Skipped as Skipped
from shardzoo.checkpoints.manifest import Source as Source
from shardzoo.checkpoints.restore import checksum as checksum
from shardzoo.checkpoints.restore import restore as restore
from shardzoo.checkpoints.save import save as save
from shardzoo.checkpoints.verify import Verified as Verified
from shardzoo.checkpoints.verify import verify as verify
from shardzoo.checkpoints.writer import CheckpointWriter as CheckpointWriter
from shardzoo.checkpoints.writer import carried_path as carried_path
