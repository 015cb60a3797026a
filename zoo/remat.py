"""Rematerialisation: what of a block is kept for the backward pass, and what is computed there again.

The `remat` option of every family's forward pass:

| `remat`         | kept of a block, besides what goes into it                                                 |
|-----------------|--------------------------------------------------------------------------------------------|
| False           | everything that its derivative reads, weights gathered from a split at rest too            |
| True            | nothing                                                                                    |
| "attention"     | the attention's results: all is computed again but the attention                           |
| "collectives"   | the same and what reductions and exchanges over the mesh gave: none of them runs again     |
| "dots"          | the same and the products by weights: only cheap operations run again                      |
| a name of JAX   | of a policy in `jax.checkpoint_policies` that needs no argument, "dots_saveable"           |
| a policy        | what `jax.checkpoint` takes, e.g. `save_only_these_names(...)`                             |

Weights that are split at rest (`layout.split_at_rest`) are gathered again in the backward pass by all of these but
False, which keeps them whole from the forward pass on: all layers of them at once.
"""

from collections.abc import Callable
from typing import Any

import jax

from shardzoo.errors import InputError
from shardzoo.kernels.flash_attention.attend import LSE_NAME, OUT_NAME

Policy = Callable[..., Any]
Remat = bool | str | Policy

# Those that bring what other devices have computed. Gathers are not among them: their results are as large as what is
# split, weights at rest above all.
_EXCHANGES = ("psum", "psum_invariant", "reduce_scatter", "all_to_all")
_DOTS = ("dot_general", "conv_general_dilated")
_attended = jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME)


def _collectives(prim: Any, *args: Any, **params: Any) -> Any:
    return prim.name in _EXCHANGES or _attended(prim, *args, **params)


def _dots(prim: Any, *args: Any, **params: Any) -> Any:
    return prim.name in _DOTS or _collectives(prim, *args, **params)


POLICIES: dict[str, Policy] = {"attention": _attended, "collectives": _collectives, "dots": _dots}
OF_JAX = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "checkpoint_dots",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots_with_no_batch_dims",
)


def check_remat(what: str, remat: Remat) -> None:
    """Refuses the name of a policy that there is not; `what` is asked for it.

    Raises:
        InputError: as said, with the names there are.
    """
    names = (*POLICIES, *OF_JAX)
    if isinstance(remat, str) and remat not in names:
        raise InputError(f"{what}: remat={remat!r} is unknown: use True, False or one of {', '.join(names)}")


def rematerialised(
    body: Callable[..., Any],
    remat: Remat,
    *,
    scanned: bool = True,
    static_argnums: int | tuple[int, ...] = (),
) -> Callable[..., Any]:
    """`body` whose backward pass keeps what `remat` says; a body that no loop runs is not `scanned`."""
    if remat is False:
        return body
    policy = POLICIES.get(remat) or getattr(jax.checkpoint_policies, remat) if isinstance(remat, str) else remat
    # In a loop the compiler cannot merge the second computation with the first: the barrier against it is not needed.
    return jax.checkpoint(
        body, prevent_cse=not scanned, policy=None if policy is True else policy, static_argnums=static_argnums
    )
