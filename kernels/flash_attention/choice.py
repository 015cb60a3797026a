"""Which implementation runs a call, and why."""

import importlib
from dataclasses import dataclass
from types import ModuleType

import jax

from shardzoo.errors import InputError
from shardzoo.kernels.flash_attention.options import Extras, Options, Shaped

# The platforms that have a kernel, by the name that lowering uses, and the module that holds it.
KERNELS = {"tpu": "tpu", "cuda": "gpu"}
IMPLEMENTATIONS = ("reference", "blockwise", *KERNELS.values())

# (platform, implementation) pairs as `jax.lax.platform_dependent` takes them; the last is ("default", ...).
Plan = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Choice:
    """The implementation that runs a call on `platform`, and the reason in words."""

    platform: str
    implementation: str
    reason: str

    def __str__(self) -> str:
        return f"{self.implementation} on {self.platform}: {self.reason}"


def module(name: str) -> ModuleType:
    """The implementation's module, imported on first use: Pallas is slow to import and a CPU needs none of it."""
    return importlib.import_module(f"{__package__}.{name}")


def refusal(name: str, q: Shaped, k: Shaped, v: Shaped, extras: Extras, options: Options) -> str | None:
    """Why the implementation cannot take the call; None when it can."""
    return module(name).supports(q, k, v, extras, options)


def known_platform() -> str | None:
    """The platform of the mesh that is being traced for; None when only lowering will tell.

    A mesh knows its devices, also those of a topology that is compiled for without having it. A "gpu" may be
    of two makers, which only lowering tells apart.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device is not None and device.platform in ("cpu", "tpu") else None


def here() -> str:
    """The platform that a call made now would run on, by the name that lowering uses."""
    platform = known_platform() or jax.default_backend()
    if platform != "gpu":
        return platform
    return "rocm" if "rocm" in jax.devices()[0].client.platform_version else "cuda"


def choose(platform: str, q: Shaped, k: Shaped, v: Shaped, extras: Extras, options: Options) -> Choice:
    """The platform's kernel if it takes the call, else the blockwise version."""
    kernel = KERNELS.get(platform)
    if kernel is None:
        return Choice(platform, "blockwise", f"there is no kernel for {platform}")
    reason = refusal(kernel, q, k, v, extras, options)
    if reason is None:
        return Choice(platform, kernel, "the platform's kernel takes the call")
    return Choice(platform, "blockwise", f"the {kernel} kernel cannot take the call ({reason})")


def plan_for(q: Shaped, k: Shaped, v: Shaped, extras: Extras, options: Options) -> Plan:
    """What runs on each platform that the call may be lowered for."""
    platform = known_platform()
    if platform is not None:
        return (("default", choose(platform, q, k, v, extras, options).implementation),)
    named = ((p, choose(p, q, k, v, extras, options).implementation) for p in KERNELS)
    kernels = tuple((p, name) for p, name in named if name != "blockwise")
    return (*kernels, ("default", "blockwise"))


def named_plan(name: str, q: Shaped, k: Shaped, v: Shaped, extras: Extras, options: Options) -> Plan:
    """The named implementation on every platform.

    Raises:
        InputError: there is none of that name, or it cannot take the call.
    """
    if name not in IMPLEMENTATIONS:
        known = ", ".join(repr(n) for n in IMPLEMENTATIONS)
        raise InputError(f"flash_attention: implementation={name!r} is unknown: use one of {known}, or None")
    reason = refusal(name, q, k, v, extras, options)
    if reason is not None:
        others = [n for n in IMPLEMENTATIONS if n != name and refusal(n, q, k, v, extras, options) is None]
        takers = " or ".join(f"implementation={n!r}" for n in others)
        raise InputError(f"flash_attention: implementation={name!r} cannot take this call ({reason}): use {takers}")
    return (("default", name),)
