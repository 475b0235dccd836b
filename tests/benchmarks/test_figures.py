"""Figures that are kept by part, and the commands that print them."""

import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from benchmarks import all as all_figures
from benchmarks import tables
from benchmarks.harness import command_line, figures, output
from benchmarks.harness.output import Table

ROOT = Path(__file__).resolve().parents[2]


def test_figures_are_kept_by_part_and_say_when_they_are_stale(tmp_path, monkeypatch, capsys):
    """A part that is known is skipped, one that fails leaves nothing, and tables are as printed."""
    path, ran = tmp_path / "figures", []
    run = subprocess.run

    def measured(command, **options):
        if command[0] != sys.executable:
            return run(command, **options)
        if command[1] == "-c":
            return types.SimpleNamespace(stdout="1 x a device\n")
        ran.append(command[2])
        assert not any(word.startswith(("--saved=docs", "--profile=runs")) for word in command)
        if command[2] == "benchmarks.reversible":
            raise subprocess.TimeoutExpired(command, options["timeout"])
        with monkeypatch.context() as patch:
            patch.setattr(output, "_recorded", [])
            arguments = command_line.parser("").parse_args([command[-1]])
            table = Table("model", "ms", "MiB", title="a title")
            table.row("one", "1.5")
            assert arguments.rows.read_text()

    monkeypatch.setattr(subprocess, "run", measured)
    all_figures.main([f"--out={path}", "--only", "step"])
    with pytest.raises(SystemExit, match="failed: reversible"):
        all_figures.main([f"--out={path}", "--only", "step", "reversible"])
    assert ran == ["benchmarks.step", "benchmarks.reversible"]
    printed = capsys.readouterr().out
    known = figures.read(path)
    assert list(known) == ["step"] and known["step"].hardware == "1 x a device"
    kept = all_figures.run("scaling", 1.0)  # its own file has figures
    assert kept.command.endswith("--saved=docs/scaling.jsonl --profile=runs/scaling")
    capsys.readouterr()
    tables.main([str(path)])
    shown = capsys.readouterr().out
    wanted = "| model | ms | MiB |\n| --- | ---: | ---: |\n| one | 1.5 | - |"
    assert "python -m benchmarks.step --lengths 65536" in shown and "a title" in shown
    assert wanted in printed and wanted in shown

    of_head = known["step"]._replace(commit=figures.git("rev-parse", "HEAD"), changed=False)
    assert of_head.stale() is None
    first = figures.git("rev-list", "--max-parents=0", "HEAD").splitlines()[0]
    assert re.fullmatch(r"older than \d+ changes? of .*", of_head._replace(commit=first).stale())
    assert "not in this repository" in of_head._replace(commit="0" * 40).stale()
    assert "no commit" in of_head._replace(changed=True).stale()


def test_figures_are_of_commands_that_pages_have():
    pages = "\n".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    shown = re.findall(r"python -m benchmarks\.([^`\n]+)", pages)
    assert {part.command for part in all_figures.PARTS.values()} <= set(shown)
