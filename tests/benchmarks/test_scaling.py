"""Steps on one device and on several."""

import json
import types
from pathlib import Path

import jax
import pytest

from benchmarks import scaling
from benchmarks.harness import command_line, configured, kernels
from reformax.declared import SettingError
from tests.training import tiny


def test_devices_at_once_take_as_long_as_the_slowest():
    alone = [scaling.Candidate(lambda s=s: s, 10, 1.0, s) for s in (2.0, 3.0)]
    together = scaling.at_once(alone)
    assert (together.run(), *together[1:]) == (3.0, 20, 1.0, 3.0)


def test_scaling_refuses_a_model_of_no_text(monkeypatch):
    text = configured.stdlib.stdlib(max_bytes=1000)
    monkeypatch.setattr(configured.stdlib, "stdlib", lambda: text)
    with pytest.raises(SettingError, match="continues text, and model TransformerEncoder names"):
        scaling.main(["--config_file=listops_short.gin"])


def test_scaling_measures_the_page_part_by_part_and_nothing_twice(tmp_path, monkeypatch, capsys):
    """Without its processes: their flags make settings, and what is saved is left out."""
    saved, parts = tmp_path / "a.jsonl", []

    def run(command, env):
        parts.append((command[3:], env))
        return types.SimpleNamespace(returncode=int("--repeats=1" in command))

    monkeypatch.setattr(scaling.subprocess, "run", run)
    kept = [f"--saved={saved}", f"--rows={tmp_path}/rows"]
    with pytest.raises(SystemExit, match=r"failed: .*length=1_048_576"):
        scaling.main(["--page", *kept])
    assert [flags[-2:] for flags, _ in parts] == [kept] * 4
    assert ["latency_hiding" in x.get("XLA_FLAGS", "") for _, x in parts] == [0, 0, 0, 1]

    monkeypatch.setattr(configured.stdlib, "stdlib", lambda: tiny.counting())
    for flags, _ in parts:
        measured = []
        monkeypatch.setattr(scaling, "measure", measured.append)
        scaling.main(flags)
        settings = configured.from_config(measured[0].config_file, measured[0].config)
        assert settings.batch_size * settings.length in (2**16, 2**20)
    monkeypatch.undo()

    shared = dict(
        machine=command_line.machine(), name="tiny 1 x 64, shared", devices=len(jax.devices())
    )
    saved.write_text("".join(json.dumps(shared | {"mesh": x}) + "\n" for x in ("data", "fsdp")))
    scaling.main(["--tiny", "--shared", f"--saved={saved}"])
    assert capsys.readouterr().out.endswith("a.jsonl has tiny 1 x 64, shared over data, fsdp\n")


def test_where_the_time_of_a_device_goes(monkeypatch):
    """A collective beside a product is hidden; copies of one stream may overlap another's."""

    def stream(*events):
        known = (dict(name=n, start_ns=a * 1e6, duration_ns=(b - a) * 1e6) for n, a, b in events)
        return types.SimpleNamespace(
            name="Stream #7", events=[types.SimpleNamespace(**x) for x in known]
        )

    first = stream(("gemm", 10, 20), ("loop_fusion_3", 26, 30), ("MemcpyD2D", 28, 31))
    second = stream(("ncclDevKernel_AllReduce_Sum_f32", 18, 25))
    modules = types.SimpleNamespace(name="XLA Modules", events=stream(("step", 0, 99)).events)
    plane = types.SimpleNamespace(name="/device:GPU:1", lines=[modules, first, second])
    monkeypatch.setattr(kernels, "_planes", lambda folder: [plane])
    assert kernels.spent(Path()) == {"/device:GPU:1": (21, 15, 5, 1)}
