"""Campaigns against training."""

import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks.reliability import __main__ as reliability_main
from benchmarks.reliability import calls as reliability_calls
from benchmarks.reliability import failing_calls, kills, preparing
from benchmarks.reliability import runs as reliability_runs

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_campaigns_find_training_reliable(tmp_path, monkeypatch, capsys):
    """Of the phases of `kills` two that compile nothing; both campaigns have one server.

    The model is tiny: each of their twenty processes traces it.
    """
    config = tmp_path / "run.gin"
    config.write_text(f"""
from __gin__ import dynamic_registration
from reformax.training import loop
from tests.training import tiny
include '{reliability_runs.CONFIG}'
loop.train.model = @tiny.TinyLM
tiny.TinyLM.vocab_size = 256
tiny.TinyLM.dropout = 0.1
""")
    monkeypatch.setattr(reliability_runs, "CONFIG", config)

    def phases_of(*traces):
        found = every_phase(*traces)
        return {name: found[name] for name in ("writing a line", "saving")}

    every_phase = kills.phases_of
    monkeypatch.setattr(kills, "phases_of", phases_of)
    with reliability_runs.runner([]) as runner:
        monkeypatch.setattr(reliability_runs, "runner", lambda keep: nullcontext(runner))
        for campaign, n_cases, right in (
            (kills, 2, "kills: {0} of {0} bit for bit, 0 records with lines lost"),
            (failing_calls, 4, "failing_calls: {0} of {0} right"),
        ):
            assert campaign.main([f"--cases={n_cases}"]) == 0
            printed = capsys.readouterr().out
            number = re.search(r"^\w+: (\d+) of", printed, re.MULTILINE)[1]
            assert int(number) > 1 and right.format(number) in printed


def test_a_call_fails_where_a_campaign_says(tmp_path):
    """The second write below a folder, and no other."""
    script = """
import os, sys
from pathlib import Path
from benchmarks.reliability import calls
here = Path(sys.argv[1])
calls.watch(here / "a", here / "log", calls.Strike("write", "*/x", 2, error=5))
for name in ("b/x", "a/sub/x", "a/sub/y", "a/sub/x", "a/sub/x"):
    try:
        (here / name).write_text("text")
        print("written", end=" ")
    except OSError as error:
        print(error.errno, end=" ")
"""
    library = reliability_calls.build(tmp_path)
    for folder in ("a/sub", "b"):
        (tmp_path / folder).mkdir(parents=True)
    environment = os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script, str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["written", "written", "written", "5", "written"]
    logged = reliability_calls.read_log(tmp_path / "log")
    written = [call.path for call in logged if call.name == "write"]
    # Closing the file tries the write that failed again.
    assert written == ["sub/x", "sub/y", "sub/x", "sub/x", "sub/x"]


@pytest.mark.slow
def test_prepare_is_killed_and_run_again(capsys):
    assert preparing.main(["--cases=2"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"bytes *\| process *\| 1 ", printed) and "kept for a look" not in printed


def test_a_part_of_a_prepared_text_is_seen(tmp_path):
    """What has its name has all its files; what is not whole yet has none, or another name."""
    for name in ("reformax_text.json", "text-1/00000.bytes", "text-1/00000.begins", "pieces/a/ids"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    want = preparing.files_of(tmp_path)
    assert not preparing.differing(tmp_path, want) and not preparing.differing(tmp_path / "b", want)
    shutil.move(tmp_path / "pieces/a", tmp_path / "pieces/a.partial")
    assert not preparing.differing(tmp_path, want)  # ids come later
    (tmp_path / "text-1/00000.begins").unlink()
    assert preparing.differing(tmp_path, want) == ["text-1/00000.begins"]
    (tmp_path / "text-1/00000.begins").write_text("another")
    assert preparing.differing(tmp_path, want) == ["text-1/00000.begins"]


def test_the_campaigns_are_listed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["reliability"])
    assert reliability_main.main() == 0
    listed = capsys.readouterr().out
    folder = Path(reliability_main.__file__).parent
    campaigns = {"channels", "failing_calls", "inputs", "kills", "power_cuts"}
    campaigns |= {"preparing", "process_kills"}
    assert all(f"  {name} " in listed for name in campaigns)
    assert {path.stem for path in folder.glob("*.py")} - campaigns - reliability_main.SHARED == {
        "__init__"
    }
