"""The `shardzoo` command: `python -m shardzoo` and the installed script."""

import contextlib
import os
import sys

INTERRUPTED = 130


def main() -> None:
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
