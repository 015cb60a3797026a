"""The `shardzoo` command: `python -m shardzoo` and the installed script."""

import sys


def main() -> None:
    try:
        # Imported here, so that Ctrl-C meanwhile ends quietly too.
        from shardzoo.cli.app import app
        from shardzoo.cli.interrupts import strike_again

        sys.unraisablehook = strike_again
        app(prog_name="shardzoo")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
