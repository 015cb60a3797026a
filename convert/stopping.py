"""Stopping the threads of a long operation, by Ctrl-C too, so that files close before anything is raised."""

import contextlib
import signal
import threading
from collections.abc import Iterator


class Stopped(Exception):
    """Another thread failed, or the user interrupted: leave quietly."""


class Interrupt:
    """Whether the user has asked to stop."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    def ask(self) -> None:
        self._asked.set()

    def check(self) -> None:
        """Raises `KeyboardInterrupt` if the user has asked."""
        if self.asked:
            raise KeyboardInterrupt


@contextlib.contextmanager
def held_back() -> Iterator[Interrupt]:
    """Turns the first Ctrl-C into a note and raises `KeyboardInterrupt` when the block ends; the second raises at once.

    Does nothing outside the main thread, or where the program handles the signal itself.
    """
    interrupt = Interrupt()
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or usual is not signal.default_int_handler:
        yield interrupt
        return

    def note(*_: object) -> None:
        interrupt.ask()
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, usual)
    interrupt.check()
