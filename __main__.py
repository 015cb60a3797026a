"""The `shardzoo` command: `python -m shardzoo` and the installed script."""

from shardzoo.cli.app import app


def main() -> None:
    app(prog_name="shardzoo")


if __name__ == "__main__":
    main()
