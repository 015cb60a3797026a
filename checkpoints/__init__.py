"""Checkpoints that restore on any mesh: written by the converter or from a live model, opened by plain Orbax too."""

import importlib
from typing import TYPE_CHECKING, Any

from shardzoo.checkpoints.checkpoint import Checkpoint, open
from shardzoo.checkpoints.grid import Grid, LeafSpec
from shardzoo.checkpoints.manifest import Leaf, Manifest, ManifestHeader, Skipped, Source
from shardzoo.checkpoints.restore import checksum, restore
from shardzoo.checkpoints.save import save
from shardzoo.checkpoints.training_state import TrainingState
from shardzoo.checkpoints.verify import Verified, verify
from shardzoo.checkpoints.writer import CheckpointWriter, carried_path

if TYPE_CHECKING:
    from shardzoo.checkpoints.orbax_source import restore_orbax
    from shardzoo.checkpoints.training import Training

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
    "Training",
    "TrainingState",
    "Verified",
    "carried_path",
    "checksum",
    "open",
    "restore",
    "restore_orbax",
    "save",
    "verify",
]

_WITH_ORBAX = {"Training": "training", "restore_orbax": "orbax_source"}


def __getattr__(name: str) -> Any:
    """What imports Orbax, imported when it is first asked for: Orbax takes longer than all else here."""
    if name in _WITH_ORBAX:
        return getattr(importlib.import_module(f"{__name__}.{_WITH_ORBAX[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
