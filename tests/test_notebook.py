"""The notebook runs from its first cell to its last."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import pages

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "examples/tutorial.ipynb"
CHECK = """
names = ("all pairs", "LSH, 4 hashes", "LSH, 1 hash", "noisy")
assert sorted(errors, key=errors.get) == list(names), errors
assert len(samples) == 2 and all(samples)
"""


def code() -> str:
    """The notebook's cells as a script; a line of the shell is a process that must succeed."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    line = re.compile(r"^!((?:.*\\\n)*.+)$", re.MULTILINE)  # the shell goes on after a backslash
    shell = line.sub(lambda found: f"run({found[1]!r}, shell=True, check=True)", text)
    return f"from subprocess import run\n{shell}\n{CHECK}"


def test_the_notebook_is_kept_without_outputs_and_compiles():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    compile(code(), NOTEBOOK.name, "exec")


def test_links_of_the_notebook_lead_somewhere():
    for link in re.findall(r"\]\((\.\./[^)#]+)", NOTEBOOK.read_text()):
        assert (NOTEBOOK.parent / link).is_file(), link


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    command = tmp_path / ".bin/reformax"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m reformax "$@"\n')
    command.chmod(0o755)
    env = pages.environment(
        tmp_path / "xla", command.parent, PYTHONPATH=str(ROOT), MPLBACKEND="agg"
    )
    done = subprocess.run(
        [sys.executable, "-"],
        cwd=tmp_path,
        env=env,
        input=code(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "bits per dim of training batches" in done.stdout
