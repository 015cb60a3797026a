"""How long operations tell their caller how far they are."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Progress(Protocol):
    """Called at each block of work, from any thread; must be cheap and must not raise."""

    def __call__(self, done: int, total: int, what: str, /) -> None:
        """`done` of `total` bytes (of a sampler: steps) are through; `what` names what is at hand."""
