"""Ctrl-C at the moments when Python alone does not cope with it."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds Ctrl-C back for the length of an import: extension modules interrupted while they load abort Python."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    struck = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: struck.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if struck.is_set():
            signal.raise_signal(signal.SIGINT)


def strike_again(unraisable: "sys.UnraisableHookArgs") -> None:
    """A hook for errors that Python drops: a Ctrl-C that struck in a finalizer strikes once more a moment later."""
    if unraisable.exc_type is KeyboardInterrupt:
        main = threading.main_thread().ident
        assert main is not None  # it runs
        threading.Timer(0.02, signal.pthread_kill, (main, signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(unraisable)
