"""What reaches standard output and standard error, on a terminal and in a pipe."""

import io
import json
import sys

import pytest

from shardzoo.cli import terminal


class Screen(io.StringIO):
    """A standard error that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_table_in_a_pipe_folds_nothing_and_marks_nothing_up(capsys):
    terminal.say_table(("name", ">bytes"), [("[red]" + "x" * 300, "1"), ("b", "22")])
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "name" + " " * 303 + "bytes",
        "[red]" + "x" * 300 + " " * 6 + "1",
        "b" + " " * 306 + " " * 3 + "22",
    ]


def test_errors_go_to_standard_error_unfolded(capsys):
    terminal.complain("[bold]/a/path" + "y" * 500)
    out, err = capsys.readouterr()
    assert out == "" and err == "error: [bold]/a/path" + "y" * 500 + "\n"


def test_no_bar_in_a_pipe(capsys):
    with terminal.progress_bar("working") as progress:
        assert progress is None
    assert capsys.readouterr() == ("", "")


def test_no_bar_for_quick_work_on_a_terminal(monkeypatch):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    with terminal.progress_bar("working") as progress:
        progress(5, 10, "blocks.attn.q.weight")
    assert "working" not in screen.getvalue()


@pytest.mark.parametrize(("columns", "named"), [("200", True), ("80", False)])
def test_bar_on_a_terminal_says_how_far_and_where_there_is_room_what(columns, named, monkeypatch):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(terminal, "BAR_AFTER", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", columns)
    with terminal.progress_bar("working") as progress:
        progress(512, 1024, "blocks.attn.q.weight")
    assert "working" in screen.getvalue() and "0.5/1.0 KiB" in screen.getvalue()
    assert ("blocks.attn.q.weight" in screen.getvalue()) == named


def test_bar_of_steps_counts_them(monkeypatch):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(terminal, "BAR_AFTER", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    with terminal.progress_bar("sampling", steps=True) as progress:
        progress(3, 50, "restoring vae")
    assert "3/50" in screen.getvalue() and "restoring vae" in screen.getvalue() and "KiB" not in screen.getvalue()


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 40, "3.0 TiB")]
)
def test_sizes_as_text(count, text):
    assert terminal.size_text(count) == text


@pytest.mark.parametrize(("count", "text"), [(12, "12"), (134_515_008, "135 M"), (14_300_000_000, "14.3 B")])
def test_counts_as_text(count, text):
    assert terminal.count_text(count) == text


def test_json_is_read_back(capsys):
    terminal.say_json({"text": "café", "list": [1, None]})
    assert json.loads(capsys.readouterr().out) == {"text": "café", "list": [1, None]}
