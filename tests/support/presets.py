"""The presets of all families."""

from shardzoo.zoo.families import MODULES, find_family


def presets() -> list[str]:
    """Their names as the command line takes them."""
    return [f"{name}/{preset}" for name in MODULES for preset in find_family(name).presets]
