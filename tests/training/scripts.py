"""Scripts called in this process, as from a command line."""

import sys

from reformax.cli import errors


def call(main, monkeypatch, capsys, *arguments):
    """(exit code, stdout, stderr) of a script's main with these flags."""
    monkeypatch.setattr(sys, "argv", ["script.py", *arguments])
    try:
        code = errors.exit_code(main)
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err
