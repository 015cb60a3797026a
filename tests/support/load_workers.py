"""Imports a module of functions that run in other processes, from beside the test that starts them."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_workers(path: Path) -> ModuleType:
    """The module at `path`, under its own name, as `processes.start` needs it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
