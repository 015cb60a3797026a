"""Which implementation runs a call, and the rule by which kernels are differentiated."""

import functools
import importlib
from types import ModuleType

import jax
from jax import lax

from shardzoo.errors import InputError
from shardzoo.kernels.flash_attention.choice import Plan, known_platform
from shardzoo.kernels.gated_delta.options import Call, Result

# The platforms that have a kernel, by the name that lowering uses, and the module that holds it.
KERNELS = {"tpu": "tpu", "cuda": "gpu"}
IMPLEMENTATIONS = ("reference", "chunked", *KERNELS.values())


def module(name: str) -> ModuleType:
    """The implementation's module, imported on first use: Pallas is slow to import and a CPU needs none of it."""
    return importlib.import_module(f"{__package__}.{name}")


def refusal(name: str, call: Call, *, parts: bool) -> str | None:
    """Why the implementation cannot take the call; None when it can."""
    return module(name).supports(call, parts=parts) if name in KERNELS.values() else None


def choose(platform: str, call: Call, *, parts: bool) -> str:
    """A single token is one step of the definition; more run in the platform's kernel if it takes the call."""
    if call.v.shape[1] == 1:
        return "reference"
    kernel = KERNELS.get(platform)
    return "chunked" if kernel is None or refusal(kernel, call, parts=parts) else kernel


def plan_for(call: Call, *, parts: bool) -> Plan:
    """What runs on each platform that the call may be lowered for."""
    platform = known_platform()
    default = choose(platform or "cpu", call, parts=parts)
    if platform is not None:
        return (("default", default),)
    named = ((p, choose(p, call, parts=parts)) for p in KERNELS)
    return (*((p, name) for p, name in named if name != default), ("default", default))


def named_plan(name: str, call: Call, *, parts: bool) -> Plan:
    """The named implementation on every platform.

    Raises:
        InputError: there is none of that name, or it cannot take the call.
    """
    if name not in IMPLEMENTATIONS:
        known = ", ".join(repr(n) for n in IMPLEMENTATIONS)
        raise InputError(f"gated_delta: implementation={name!r} is unknown: use one of {known}, or None")
    reason = refusal(name, call, parts=parts)
    if reason is not None:
        others = "implementation='chunked' or implementation='reference'"
        raise InputError(f"gated_delta: implementation={name!r} cannot take this call ({reason}): use {others}")
    return (("default", name),)


def run(plan: Plan, call: Call, scale: float, *, parts: bool) -> Result:
    """Runs the plan on a checked call. Without a kernel in it JAX differentiates it as it stands."""
    if len(plan) == 1 and plan[0][1] not in KERNELS.values():
        return module(plan[0][1]).run(call, scale, parts=parts)
    return _rule(plan, scale, parts, call)


def _by_platform(plan: Plan, step: str, scale: float, parts: bool, *arrays: Call | Result) -> Call | Result:
    """The step, "run" or "backward", of the implementation for the platform that is lowered for."""

    def branch(name: str):
        def forward(call: Call) -> Result:
            return module(name).run(call, scale, parts=parts)

        def backward(call: Call, change: Result) -> Call:
            if name in KERNELS.values():
                return module(name).backward(call, scale, change, parts=parts)
            return jax.vjp(forward, call)[1](change)[0]

        return forward if step == "run" else backward

    *special, (_, default) = plan
    if not special:
        return branch(default)(*arrays)
    return lax.platform_dependent(*arrays, default=branch(default), **{p: branch(name) for p, name in special})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _rule(plan: Plan, scale: float, parts: bool, call: Call) -> Result:
    return _by_platform(plan, "run", scale, parts, call)


def _forward(plan: Plan, scale: float, parts: bool, call: Call) -> tuple[Result, Call]:
    """Keeps the arguments alone: the backward pass runs the recurrence again, whatever the platform."""
    return _rule(plan, scale, parts, call), call


def _backward(plan: Plan, scale: float, parts: bool, call: Call, change: Result) -> tuple[Call]:
    return (_by_platform(plan, "backward", scale, parts, call, change),)


_rule.defvjp(_forward, _backward)
