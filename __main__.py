"""The `shardzoo` command: `python -m shardzoo` and the installed script."""

import contextlib
import gc
import os
import sys

INTERRUPTED = 130
LOOK = 10_000  # objects made between two looks for garbage: importing JAX makes many more, and all of them stay


def main() -> None:
    gc.set_threshold(LOOK)
    try:
        # Imported here, so that Ctrl-C meanwhile ends quietly too.
        from shardzoo.cli.app import app
        from shardzoo.cli.interrupts import strike_again

        sys.unraisablehook = strike_again
        app(prog_name="shardzoo")
    except KeyboardInterrupt:
        _end_at_once()
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            _end_at_once()
        raise
    finally:
        gc.freeze()  # the system takes all memory back: what is left need not be looked through three times before


def _end_at_once() -> None:
    """Ends an interrupted command, whose work is put away, without taking the interpreter down.

    Threads of XLA still compile or compute what nobody waits for, and would crash then.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
            stream.flush()
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
