"""The benchmarks, on shapes that take no time."""

import argparse
import collections
import functools
import importlib
import json
import math
import os
import pkgutil
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from contextlib import nullcontext
from pathlib import Path

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reformax.ops
from benchmarks import all as all_figures
from benchmarks import (
    associative_recall,
    attention,
    generation,
    global_layers,
    long_range_arena,
    published,
    reversible,
    scaling,
    step,
    tables,
)
from benchmarks.harness import (
    attention_table,
    by_length,
    calls,
    campaign,
    command_line,
    configured,
    figures,
    kernels,
    lines,
    output,
    processes,
    rows,
    side_by_side,
)
from benchmarks.harness.calls import reason
from benchmarks.harness.output import Table
from benchmarks.peers import names, triton_tuning
from benchmarks.reliability import __main__ as reliability_main
from benchmarks.reliability import calls as reliability_calls
from benchmarks.reliability import failing_calls, kills, preparing
from benchmarks.reliability import runs as reliability_runs
from benchmarks.rows import attention as attention_rows
from benchmarks.rows import recall as recall_rows
from benchmarks.rows import trained as trained_rows
from reformax.declared import SettingError
from reformax.models import ReformerLM
from reformax.ops import flash, lsh
from reformax.training.callbacks import Callback
from tests import pages
from tests.helpers import changed
from tests.training import tiny

ROOT = Path(__file__).resolve().parents[1]
(TINY,) = step.SHAPES["tiny"]
OURS, TRAX = step.REFORMER, f"{step.TRAX}, n_parallel_heads=1"

# A command's flags, and the text that it prints once it has done everything. Every kind that the
# pages have is here; neither their tests nor `.ci/walk` run it again.
COMMANDS = [
    (
        "associative_recall",
        "--only flash linear --at_once=2 --out={path}/a.jsonl",
        "| linear | 8 | 0.2 |",
    ),
    (
        "attention",
        '--only lsh "local, chunks" --tokens=128 --peers --saved={path}/a.jsonl',
        "| reformer_pytorch LSH | lsh | - | - |",
    ),
    ("attention", "--only moba --unchecked --at_once=2 --n_heads=1 --d_head=16", "| moba | "),
    ("families", "--only llama phi3 --peers", "| phi3 | ImportError: none here |"),
    ("generation", "", "| reformax, ordinary | 1 |"),
    ("generation", "--prompt_len=70", "| dense | 70 | 1 | 0.0"),
    ("generation", "--prompt_len=70 --far csa 'dsa, hashed'", "| dsa, hashed | 70 | 1 | 0.0"),
    (
        "global_layers",
        "--only flash windows --at_once=2 --saved={path}/a.jsonl --runs={path}/runs",
        "| windows | ",
    ),
    (
        "long_range_arena",
        "--task=listops_short --only flash retention --at_once=2 --saved={path}/a.jsonl",
        "| retention | ",
    ),
    (
        "long_range_arena",
        "--task=listops_short --only flash --pretrained --curriculum --runs={path}/runs",
        "| flash | ",
    ),
    (
        "long_range_arena",
        "--task=listops_short --only flash retention --curriculum --pooling=cls",
        "| retention | ",
    ),
    (
        "long_range_arena",
        "--task=pathfinder --only configured",
        "| the config's own | ",
    ),
    ("program", "--attention lsh --gradient --causal", "lsh, causal, gradient, 1 x 128 tokens"),
    ("program", "--attention lsh --gradient --run", "lsh, gradient, 1 x 128 tokens"),
    ("program", "--largest=2", "a step of 1 x 64 tokens: "),
    (
        "published",
        "--only gpt2 bert_large --profile",
        "| PyTorch, compiled | ImportError: none here |",
    ),
    ("recall", "", "| keys, noise 1 |"),
    ("reversible", "", "| float32, exact | 2 | 0 |"),
    (
        "reversible",
        "--minutes=0.001 --layers=4 --length=512 --at_once=2 --only "
        "'reversible, all again' 'Transformer, attention kept'",
        "| Transformer, attention kept | - | ",
    ),
    ("scaling", "--saved={path}/a.jsonl", "| fsdp 1 | "),
    ("step", "", "| reformax TransformerLM, dense | "),
]


@pytest.mark.parametrize(
    "name, sizes",
    [
        ("gpt2", (768, 12, 12, 32, 1024, 50_304, False)),
        ("gpt2_medium", (1024, 24, 16, 16, 1024, 50_304, False)),
        ("bert_large", (1024, 24, 16, 32, 512, 30_592, True)),
    ],
)
def test_the_published_models_are_those_of_the_configs(name, sizes):
    job = published.from_config(name, ())
    assert job.shape == sizes
    assert job.adamw.keys() == {"learning_rate", "b2", "weight_decay"}  # what PyTorch's reads


def test_devices_at_once_take_as_long_as_the_slowest():
    alone = [scaling.Candidate(lambda s=s: s, 10, 1.0, s) for s in (2.0, 3.0)]
    together = scaling.at_once(alone)
    assert (together.run(), *together[1:]) == (3.0, 20, 1.0, 3.0)


def test_scaling_refuses_a_model_of_no_text(monkeypatch):
    text = configured.stdlib.stdlib(max_bytes=1000)
    monkeypatch.setattr(configured.stdlib, "stdlib", lambda: text)
    with pytest.raises(SettingError, match="continues text, and model TransformerEncoder names"):
        scaling.main(["--config_file=listops_short.gin"])
    gin.clear_config()


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
        gin.clear_config()
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


def module_of(name):
    """The module of a command: a benchmark, or a tool."""
    folder = "tools" if (ROOT / f"tools/{name}.py").is_file() else "benchmarks"
    return importlib.import_module(f"{folder}.{name}")


@pytest.mark.slow
@pytest.mark.parametrize("name, flags, last", COMMANDS)
def test_every_command_runs(name, flags, last, tmp_path, monkeypatch, capsys):
    """Peers in PyTorch are told that it is missing, wherever the tests run."""
    (tmp_path / "torch.py").write_text("raise ImportError('none here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    flags = ["--tiny", *shlex.split(flags.format(path=tmp_path))]
    module_of(name).main(flags)
    assert last in capsys.readouterr().out


def traced(file, given):
    """The model of a config, which is taken whole; it is traced with its gradient."""
    from reformax.cli import config, parsed
    from reformax.training import loop
    from reformax.training.settings import build

    config.parse([file], given)
    settings = parsed.bindings(loop.train, ("model", "length"))
    model, key = build(settings["model"], "train"), jax.random.PRNGKey(0)
    shape = (1, settings["length"])
    params = jax.eval_shape(lambda key: model.init_params(key, shape), key)

    def loss(params, tokens):
        return model.features(params, tokens, rng=key).sum()

    tokens = jax.ShapeDtypeStruct(shape, "int32")
    jax.eval_shape(jax.grad(loss, allow_int=True), params, tokens)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", global_layers.ROWS)
@pytest.mark.parametrize("reversible", [False, True])
def test_every_row_of_global_layers_is_a_model(reversible, name):
    args = argparse.Namespace(reversible=reversible, steps=900, tiny=True, data_dir=None)
    model = traced(*global_layers.config_of(name, args))
    kinds = 1 if name == "windows" else 3 if name in global_layers.HYBRIDS else 2
    assert len({op.name for op in model.attention_type}) == kinds


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, pretrained",
    [
        (name, pretrained)
        for name, settings in long_range_arena.ROWS.items()
        if settings
        for pretrained in ((False,) if long_range_arena.CAUSAL in settings else (False, True))
    ],
)
def test_every_row_of_long_range_arena_is_a_model(name, pretrained):
    given = dict(task="listops", steps=9, pretrained=pretrained, tiny=False, runs=Path("runs"))
    given |= dict(curriculum=False, pooling="cls")
    causal = long_range_arena.CAUSAL in long_range_arena.ROWS[name]
    parts = long_range_arena.parts_of(name, argparse.Namespace(**given))
    models = [traced(*part) for part in parts]
    kinds = [model.task_kind for model in models]
    assert kinds == (["masked", "labels"] if pretrained else ["labels"])
    assert len({(model.vocab_size, model.d_model) for model in models}) == 1
    assert models[-1].causal == causal
    assert causal or models[-1].attention_type.causality != "only"
    assert models[-1].pooling == ("last" if causal else "cls")
    assert name.split(",")[0] in (models[-1].attention_type.name, "bigbird")


@pytest.mark.slow
@pytest.mark.parametrize(
    "module, flags, message",
    [
        (generation, "--mesh=data=1", "--mesh is .* which is not read without --prompt_len"),
        (generation, "--mesh=rows=1 --prompt_len=9", "--mesh: mesh is 'rows=1': expected sizes of"),
        (generation, "--far csa", "--far is .* which is not read without --prompt_len"),
        (generation, "--prompt_len=9 --repeats=2", "--repeats is 2, which is not read with --prom"),
        (reversible, "--tiny --layers=4", "--layers is 4, which is not read without --minutes"),
        (reversible, "--data_dir=text", "--data_dir is text, which is not read without --minutes"),
    ],
)
def test_a_flag_that_is_not_read_is_refused(module, flags, message, capsys):
    with pytest.raises(SystemExit):
        module.main(flags.split())
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("name", reversible.ROWS)
def test_every_deep_row_is_a_model_of_48_layers(name):
    args = argparse.Namespace(layers=48, length=65_536, tiny=False)
    part = reversible.config_of(name, args, 100)
    if name.endswith("offloaded"):
        with pytest.raises(SettingError, match="offload_activations is True"):
            traced(*part)
        return
    model = traced(*part)
    assert (model.n_layers, model.d_model, model.scan_layers) == (48, 768, True)
    assert isinstance(model, ReformerLM) == name.startswith("reversible")
    assert model.remat_policy == ("nothing" if "all again" in name else "attention")


@pytest.mark.parametrize("task, n_pixels", [("pathfinder", 1024), ("path_x", 16_384)])
@pytest.mark.slow
def test_pathfinder_has_the_positions_of_its_grid(task, n_pixels):
    given = dict(task=task, steps=9, pretrained=True, curriculum=False, tiny=False)
    given |= dict(pooling="mean", runs=None)
    masked, classes = long_range_arena.parts_of(long_range_arena.OWN, argparse.Namespace(**given))
    assert "loop.train.stages=()" in masked[1] and "loop.train.stages=()" not in classes[1]
    for part in (masked, classes):
        model = traced(*part)
        assert model.pos_type == "rotary" and math.prod(model.pos_axial_shape) == n_pixels


@pytest.mark.parametrize("task, steps", [("pathfinder", 560), ("listops", 1400)])
def test_the_warm_up_of_a_task_is_its_own(task, steps):
    given = dict(task=task, steps=14_000, pretrained=False, curriculum=False, tiny=False)
    given |= dict(pooling="mean", runs=None)
    ((_, settings),) = long_range_arena.parts_of("flash", argparse.Namespace(**given))
    assert f"warmup_steps={steps}" in settings


@pytest.mark.parametrize("lengths, at_once", [([64, 1024], [None]), ([64, 128, 2**20], [None, 1])])
def test_long_rows_are_compiled_one_after_another(lengths, at_once, tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(attention, "measure", lambda *given: found.append(given[-1]))
    shape = attention.SHAPES["tiny"]._replace(lengths=tuple(lengths))
    figures = attention.Figures(shape, None)
    run = attention.Run(shape, figures, 1, 9.0, tmp_path, True, None)
    attention.measure_all(run, ["sinks"], None, [])
    assert found == at_once


def test_a_seed_below_0_is_refused(capsys):
    with pytest.raises(SystemExit):
        global_layers.main(["--tiny", "--seed=-1"])
    assert "argument --seed: -1: expected at least 0" in capsys.readouterr().err


def test_a_curriculum_begins_with_short_lists():
    given = dict(task="listops", steps=9, pretrained=True, curriculum=True, tiny=False)
    given |= dict(pooling="mean", runs=None)
    parts = long_range_arena.parts_of("flash", argparse.Namespace(**given))
    last = [dict(x.split("=", 1) for x in settings) for _, settings in parts]
    assert [x.get("length") for x in last] == [None, "128", "512", None]
    assert [x.get("batch_size") for x in last] == [None, "512", "128", None]
    assert [x["steps"] for x in last] == ["9", "6", "6", "9"]
    assert ["loop.train.fresh_heads" in x for x in last] == [False, True, False, False]


def test_a_curriculum_of_a_task_that_has_none_is_refused(capsys):
    with pytest.raises(SystemExit):
        long_range_arena.main(["--task=cifar10", "--curriculum"])
    told = "--curriculum with --task=cifar10: expected one of listops, listops_short"
    assert told in capsys.readouterr().err


def test_rows_are_spread_over_gpus(tmp_path, monkeypatch, capsys):
    """Each has as many rows as are at once on it, and takes another when one has ended."""
    on, together = collections.Counter(), []

    def ask(python, function, *, env, turn, **request):
        gpu = env["CUDA_VISIBLE_DEVICES"]
        assert turn.endswith({"5": "turn5", "7": "turn7"}[gpu])
        on[gpu] += 1
        together.append(dict(on))
        time.sleep(0.01)
        on[gpu] -= 1
        yield {"bits": 1.0, "n_targets": 10, "tokens_per_second": 1.0, "accuracy": 0.5}

    monkeypatch.setattr(campaign, "ask", ask)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    long_range_arena.main(["--gpus=2", "--at_once=2", f"--runs={tmp_path}"])
    assert len(together) == len(long_range_arena.ROWS) - 1  # lists have no attention for them alone
    assert all(max(counts.values()) <= 2 for counts in together)
    assert any(set(counts) == {"5", "7"} for counts in together)
    assert "| linformer | 50.0% | 1.000 | 10 | 1 |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="gpus is 3 and CUDA_VISIBLE_DEVICES is 5,7: .* at most 2"):
        long_range_arena.main(["--gpus=3", f"--runs={tmp_path}"])


def test_rows_of_other_data_or_seeds_are_trained_again(tmp_path, monkeypatch, capsys):
    """A home's '~' may stand before the data."""
    trained = []

    def ask(python, function, *, name, parts, data_dir, folder, **request):
        trained.append((name, data_dir, folder, parts[0][1][-1]))
        yield {"bits": 1.0, "n_targets": 10, "tokens_per_second": 1.0}

    monkeypatch.setattr(campaign, "ask", ask)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/a.whl").write_bytes(b"")
    flags = ["--steps=3", f"--saved={tmp_path / 'saved'}", f"--runs={tmp_path}", "--only", "flash"]
    for data_dir in ("~/wheels", tmp_path / "wheels", "~/other", "~/other"):
        global_layers.main([f"--data_dir={data_dir}", *flags])
    for _ in range(2):
        global_layers.main(["--data_dir=~/other", "--seed=1", *flags])
    assert trained == [
        ("flash", str(tmp_path / data), str(tmp_path / folder / "flash"), f"loop.train.seed={seed}")
        for data, folder, seed in (
            ("wheels", "3_wheels", 0),
            ("other", "3_other", 0),
            ("other", "3_other_seed1", 1),
        )
    ]
    args = argparse.Namespace(reversible=False, steps=3, tiny=False, data_dir=tmp_path / "wheels")
    assert "package_sources" in global_layers.config_of("flash", args)[1][-2]


def _of_pages():
    """The benchmarks of the pages and their flags."""
    found = (command for page in pages.PAGES for command in pages.commands(page.read_text()))
    return [match.groups() for match in map(pages.benchmark, found) if match]


@pytest.mark.parametrize("name, flags", _of_pages())
def test_a_command_of_a_page_is_one_that_runs(name, flags, monkeypatch):
    """Its flags are taken, and one of `COMMANDS` has those that say what it does."""

    class Taken(Exception):
        pass

    def parse_args(parser, argv):
        parse(parser, argv)
        raise Taken

    parse = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    with pytest.raises(Taken):
        module_of(name).main(shlex.split(flags))
    switches = set(re.findall(r"--\w+(?= --|$)", flags))
    assert any(name == other and switches <= set(run.split()) for other, run, _ in COMMANDS)


@pytest.mark.parametrize("name", sorted({name for name, *_ in COMMANDS}))
def test_help_says_what_a_command_prints_and_draws(name, capsys):
    module = module_of(name)
    with pytest.raises(SystemExit) as stop:
        module.main(["--help"])
    printed = capsys.readouterr().out
    assert stop.value.code == 0 and module.__doc__.strip() in printed


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


def test_no_benchmark_imports_another():
    folder = Path(step.__file__).parent
    files = [*folder.glob("*.py"), *folder.glob("*/*.py")]
    assert len(files) > 15
    for path in files:
        for imported in re.findall(r"from benchmarks(\S*) import (.*)", path.read_text()):
            own = (".reliability",) if path.parent.name == "reliability" else ()
            shared = (".harness", ".peers", ".rows", *own)
            assert imported[0].startswith(shared), (path, imported)


def cells(table: str, row: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {row} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def measured(rows, repeats):
    return step.measure(rows, TINY, repeats)


@pytest.fixture(scope="module")
def results():
    rows = step.candidates(TINY)
    return measured({name: rows[name] for name in (OURS, TRAX)}, repeats=2)


@pytest.mark.slow
def test_both_train_and_are_of_one_size(results):
    ours, trax = results[OURS], results[TRAX]
    assert len(ours.seconds) == len(trax.seconds) == 2
    sizes = [sum(w.size for w in jax.tree.leaves(x.state[0])) for x in (ours, trax)]
    assert sizes[0] == sizes[1]


@pytest.mark.slow
def test_the_table_compares_with_trax_where_it_ran(results, capsys):
    step.print_table(results, TINY)
    table = capsys.readouterr().out
    ratio = results[TRAX].median / results[OURS].median
    assert cells(table, OURS)[-1] == f"{ratio:.2f}"
    assert cells(table, TRAX)[-1] == "1.00"


def constant_model(logit: float) -> step.Model:
    """Predicts byte 0 with `logit`, and the rest evenly."""
    return step.Model(
        {"w": jnp.full((), logit)},
        lambda weights, tokens, rng: (
            jnp.zeros((*tokens.shape, step.VOCAB_SIZE)).at[..., 0].set(weights["w"])
        ),
    )


def test_every_step_starts_from_the_weights_of_the_last():
    runner = measured({"row": lambda: constant_model(0.5)}, repeats=3)["row"]
    # Adam moves a weight whose gradient keeps its sign by its learning rate, here in 2 + 3 steps.
    assert float(runner.state[0]["w"]) == pytest.approx(0.5 - 5 * 1e-4, abs=2e-5)


@pytest.mark.parametrize(
    "logit, reason", [(100.0, "first loss"), (math.nan, "the loss of step 1 is nan")]
)
def test_a_model_whose_loss_is_wrong_gets_no_time(logit, reason, capsys):
    rows = {"right": lambda: constant_model(0.0), "wrong": lambda: constant_model(logit)}
    results = measured(rows, repeats=1)
    step.print_table(results, TINY)
    table = capsys.readouterr().out
    assert results["right"].seconds
    assert isinstance(results["wrong"], ArithmeticError)
    assert reason in cells(table, "wrong")[1]
    assert set(cells(table, "wrong")[2:]) == {"-"}


def test_a_peer_that_fails_is_a_row_and_no_error(monkeypatch, capsys):
    def fail():
        raise MemoryError("out of memory")

    rows = {OURS: lambda: constant_model(0.0), TRAX: fail}
    monkeypatch.setattr(step, "candidates", lambda shape: rows)
    monkeypatch.setattr(step, "baseline", lambda shape: {"Transformer": rows[OURS]})
    step.main(["--tiny", "--repeats=1"])
    printed = capsys.readouterr().out
    assert cells(printed, TRAX)[1] == "MemoryError: out of memory"
    assert cells(printed, OURS)[-1] == "nan"

    rows[OURS] = fail
    with pytest.raises(SystemExit, match=f"failed: {OURS}, Transformer"):
        step.main(["--tiny", "--repeats=1"])


@pytest.mark.parametrize("flag", ["--repeats=0", "--repeats=-1"])
def test_a_number_of_calls_below_1_is_refused(flag, capsys):
    with pytest.raises(SystemExit):
        step.main(["--tiny", flag])
    assert "argument --repeats" in capsys.readouterr().err


def test_a_length_that_no_table_has_is_refused(capsys):
    with pytest.raises(SystemExit):
        step.main(["--tiny", "--lengths", "7"])
    assert "--lengths" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, line",
    [
        (["--limit=0"], "argument --limit: 0: expected more than 0 seconds"),
        (["--limit=nan"], "argument --limit: nan: expected more than 0 seconds"),
        (["--table=t", "--tokens=64"], "--tokens is 64: it goes without --table, leave one out"),
        (["--table=t", "--unchecked"], "--unchecked is True: it goes without --table"),
        (["--table=t", "--peers=python3"], "--peers is python3: it goes without --table"),
    ],
)
def test_flags_that_the_suite_of_attention_cannot_read_are_refused(flags, line, capsys):
    with pytest.raises(SystemExit):
        attention.main(["--tiny", *flags])
    assert line in capsys.readouterr().err


def test_rows_are_tried_at_the_same_time_and_stay_failed():
    """As many as `threads` says: each waits here until as many others run too."""
    barrier = threading.Barrier(3)
    rows = dict(a=1, b=2, c=3, failed=ValueError("before"))
    results = calls.attempt_each(lambda row: row / (barrier.wait(timeout=30) >= 0), rows, 4)
    assert results == rows


def test_calls_take_turns():
    order = []
    times = calls.in_turn({n: lambda n=n: order.append(n) for n in "ab"}, repeats=3)
    assert "".join(order) == "ab" * 4
    assert set(times) == {"a", "b"} and all(t >= 0 for t in times.values())


@pytest.mark.slow
def test_generation_against_the_forward(monkeypatch, capsys):
    """Everything runs; the times are made up: 1 ms for the prompt, 3 for all, 9 for the forward."""

    def in_turn(functions, repeats):
        assert repeats == 1
        for function in functions.values():
            function()
        return {name: {"forward": 0.009, 1: 0.001, 9: 0.003}[name] for name in functions}

    monkeypatch.delitem(generation.LSH, "strictly causal")
    monkeypatch.setattr(generation, "in_turn", in_turn)
    generation.main(["--tiny", "--repeats=1"])
    row = cells(capsys.readouterr().out, "reformax, ordinary")
    assert row[1:] == ["1", "0.250", "4,000", "0.00", "9.0", "36"]


def test_a_missing_peer_is_a_row(monkeypatch, capsys):
    def missing(*_):
        raise ImportError("no module | named torch")

    monkeypatch.setattr(generation, "theirs", missing)
    monkeypatch.setattr(generation, "ours", lambda *_: (0.002, 0.1))
    monkeypatch.setattr(generation, "reformer", lambda *_, **__: (None, None))
    shape = generation.SHAPES["tiny"]._replace(axial=True)
    monkeypatch.setitem(generation.SHAPES, "tiny", shape)
    generation.main(["--tiny", "--repeats=1"])
    printed = capsys.readouterr().out
    assert cells(printed, "reformax, ordinary")[1:5] == ["1", "2.000", "500", "0.10"]
    name = "Hugging Face, float32, generate"
    assert cells(printed, name)[2] == "ImportError: no module / named torch"


TINY_ATTENTION = attention.SHAPES["tiny"]


LSH = attention_rows.row("lsh, 1 hash", TINY_ATTENTION)


def wrong_output(op):
    return changed(op, _apply=lambda self, *args: 1.001 * op._apply(*args))


def wrong_gradient(op):
    def apply(self, call, params, q, *args):
        return op._apply(call, params, q + 1e-3 * (q - jax.lax.stop_gradient(q)), *args)

    return changed(op, _apply=apply)


def wrong_plan(op):
    def plan(self, call, *args):
        return op._plan(call.but(rng=jax.random.fold_in(call.rng, 1)), *args)

    return changed(op, _plan=plan)


def lost_positions(op):
    def plan(self, *args):
        order = op._plan(*args)
        return order._replace(query_positions=order.query_positions // 2 * 2)

    return changed(op, _plan=plan)


@pytest.mark.parametrize(
    "spoil, reason",
    [
        (wrong_output, "the output in float32 is"),
        (wrong_gradient, "the gradient in float32 is"),
        (wrong_plan, "the plan has"),
        (lost_positions, "the plan is no permutation"),
    ],
)
def test_attention_that_is_wrong_is_found(spoil, reason):
    with pytest.raises(ArithmeticError, match=reason):
        attention_rows.check(LSH, TINY_ATTENTION, spoil)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["lsh, 1 hash", "local", "memory_efficient", "linear"])
def test_attentions_pass_their_checks(name, dtype):
    shape = TINY_ATTENTION._replace(dtype=dtype)
    errors = attention_rows.check(attention_rows.row(name, shape), shape)
    assert 0 < max(errors) < attention_rows.TOLERANCE[dtype]


def asked_of_a_row(name, folder, **options):
    """What the process of a row answers, without its stages."""
    shape = TINY_ATTENTION._asdict() | dict(lengths=[64])
    given = dict(lengths=[64], known={}, known_errors=None, repeats=1) | options
    answers = attention_rows.by_length(name, shape, folder=str(folder), limit=9.0, **given)
    return [x for x in answers if "stage" not in x]


@pytest.mark.slow
def test_attention_is_timed_where_it_is_right(tmp_path, monkeypatch):
    (answer,) = asked_of_a_row("lsh, packed", tmp_path)
    assert max(answer["errors"]) < 1e-5 and answer["gradient"].ms > 0
    check = attention_rows.check
    monkeypatch.setattr(attention_rows, "check", lambda *given: check(*given, wrong_output))
    (answer,) = asked_of_a_row("lsh, packed", tmp_path)
    assert answer["error"].startswith("ArithmeticError: the output in float32")


def test_a_row_that_does_not_compile_is_its_reason(tmp_path, monkeypatch):
    def fail(*inputs):
        raise MemoryError("out of memory")

    monkeypatch.setattr(attention_rows, "compile_row", fail)
    (answer,) = asked_of_a_row("flash", tmp_path, known_errors=[])
    assert answer == {"name": "flash", "length": 64, "error": "MemoryError: out of memory"}


def test_rows_stand_in_their_groups_with_what_they_are_compared_with():
    groups = attention_rows.algorithms(TINY_ATTENTION)
    found = attention.chosen(["nsa", "blocks"], groups)
    assert list(found) == ["flash", "flash, 1 head of keys", "nsa", *groups["blocks"]]
    assert {known.of for known in names.PEERS.values()} <= attention.chosen(groups, groups).keys()
    for name in sum(map(list, groups.values()), []):
        alone = attention.chosen([name], groups)
        assert alone.keys() >= {made.dense for made in alone.values()}
    with pytest.raises(ValueError, match="--only has no: expected some of exact, hashed, "):
        attention.chosen(["no", "lsh"], groups)


@pytest.mark.parametrize("name", ["gated_linear", "gated_delta", "kda"])
def test_a_recurrence_of_jax_linear_attention_gets_our_inputs(name, monkeypatch):
    """A token by token recurrence stands in the place of the package."""

    def linear_attention(kind, q, k, v, g, beta=None, use_qk_l2norm=False):
        assert use_qk_l2norm == (beta is not None)
        if use_qk_l2norm:
            q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        decay = jnp.exp(g if g.ndim == 4 else g[..., None])
        beta = jnp.ones(g.shape[:3]) if beta is None else beta
        state, rows = jnp.zeros((*v[:, 0].shape, q.shape[3])), []
        for t in range(q.shape[1]):
            state = state * decay[:, t, :, None]
            old = jnp.einsum("bnvh,bnh->bnv", state, k[:, t]) if use_qk_l2norm else 0
            written = beta[:, t, :, None] * (v[:, t] - old)
            state = state + written[..., None] * k[:, t, :, None]
            rows.append(jnp.einsum("bnvh,bnh->bnv", state, q[:, t]) / q.shape[3] ** 0.5)
        return jnp.stack(rows, axis=1), state

    package = types.ModuleType("jla.ops")
    package.linear_attention = linear_attention
    monkeypatch.setitem(sys.modules, "jla", types.ModuleType("jla"))
    monkeypatch.setitem(sys.modules, "jla.ops", package)
    monkeypatch.setattr(attention_rows.jax_linear_attention, "is_installed", lambda: True)
    shape = TINY_ATTENTION._replace(check_length=16)
    errors = attention_rows.check(attention_rows.row(f"jax-linear-attention, {name}", shape), shape)
    assert 0 < max(errors) < 1e-5


def test_a_process_of_peers_that_fails_is_an_error(tmp_path):
    (answer,) = processes.ask(sys.executable, "no_module.no_function")
    assert answer["error"].startswith("ModuleNotFoundError: ")
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'{"name": "x"}\'\nexit 3\n')
    python.chmod(0o755)
    assert list(processes.ask(str(python), "")) == [
        {"name": "x"},
        {"error": "ended with status 3"},
    ]


@pytest.mark.parametrize(
    "seconds, most, n_calls, figures",
    [
        (1, 1000, 2 + 5 + 2 + 20, (1000, 1000)),
        (1, 12, 2 + 5 + 2 + 5, (1000, 1000)),
        (7, 12, 2, (7000, 7000)),
    ],
)
def test_of_slow_calls_fewer_are_timed(monkeypatch, seconds, most, n_calls, figures):
    clock, made = [0.0], []

    def call():
        made.append(0)
        clock[0] += seconds

    monkeypatch.setattr(calls.time, "perf_counter", lambda: clock[0])
    assert calls.time_calls(call, lambda result: None, 5, most) == figures
    assert len(made) == n_calls


def test_one_process_at_a_time_holds_a_lock(tmp_path):
    lock, order = tmp_path / "lock", []

    def later():
        with processes.alone(lock):
            order.append("second")

    with processes.alone(lock):
        waiting = threading.Thread(target=later)
        waiting.start()
        waiting.join(0.1)
        order.append("first")
    waiting.join()
    assert order == ["first", "second"]


SAVES = """#!{python}
import signal, time
from pathlib import Path

def save(*_):
    time.sleep(0.1)
    Path("{path}").write_text("saved")
    print('{{"error": "ended by a signal"}}')
    raise SystemExit({status})

signal.signal(signal.SIGTERM, save)
print('{{"stage": "trains", "limit": 0.2}}', flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("status", [0, 143])
def test_a_process_that_is_late_saves_what_it_has(status, tmp_path):
    python, saved = tmp_path / "python", tmp_path / "saved"
    python.write_text(SAVES.format(python=sys.executable, path=saved, status=status))
    python.chmod(0o755)
    answers = list(processes.ask(str(python), "", patience=30))
    assert answers == [{"error": "TimeoutError: more than 0.2 s: trains"}]
    assert saved.read_text() == "saved"


@pytest.mark.slow
def test_a_row_that_is_cut_off_goes_on(tmp_path, monkeypatch):
    args = argparse.Namespace(
        **dict(task="listops_short", steps=20, pretrained=False, curriculum=False),
        **dict(tiny=True, pooling="mean", runs=None),
    )
    parts = [
        (file, [*settings, "listops.listops.n_eval=4"])
        for file, settings in long_range_arena.parts_of("flash", args)
    ]
    request = dict(name="flash", parts=parts, data_dir=None, folder=str(tmp_path / "run"))
    request |= dict(turn=str(tmp_path / "turn"), limit=None)

    def stops(turn, last, name):
        return Callback(on_step=lambda step, _: step == 2 and signal.raise_signal(signal.SIGTERM))

    with monkeypatch.context() as patch:
        patch.setattr(trained_rows, "in_turn", stops)
        with pytest.raises(TimeoutError, match=r"^saved after step \d of 20$"):
            list(trained_rows.train(**request))
    _, found = trained_rows.train(**request)
    lines = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines if x["split"] == "train"] == [*range(1, 21)]
    assert found["steps"] == 20 and found["n_targets"] == 4


def test_a_row_that_names_none_right_in_the_end_has_that_score():
    lines = [{"split": "valid", "accuracy": x} for x in (0.5, None, 0.0)]
    assert trained_rows._of(lines, "valid", lambda line: line["accuracy"]) == [0.5, 0.0]


TRAINS = """
import os, sys, time
from pathlib import Path
from benchmarks.rows.trained import in_turn

folder, name, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
(trains := in_turn(folder / "turn", 3, name).on_step)(1, {})
alone = folder / "trains"
alone.mkdir()  # fails where another process trains
time.sleep(0.2)
alone.rmdir()
if last < 3:
    os._exit(1)
trains(2, {})
trains(3, {})
time.sleep(0.5)  # evaluates
"""


@pytest.mark.slow
def test_processes_train_in_turn_and_a_process_that_fails_gives_its_turn_back(tmp_path):
    command = [sys.executable, "-c", TRAINS, str(tmp_path)]
    last = {"fails": 2, "a": 3, "b": 3}
    options = dict(cwd=ROOT, stderr=subprocess.PIPE, text=True)
    with processes.alone(tmp_path / "turn"):
        trainings = [subprocess.Popen([*command, x, str(n)], **options) for x, n in last.items()]
        for training in trainings:
            assert training.stderr.readline().endswith("compiled\n")
    said = [training.communicate(timeout=60)[1] for training in trainings]
    assert [training.returncode for training in trainings] == [1, 0, 0], said
    assert "fails: trained" not in said[0] and "a: trained" in said[1] and "b: trained" in said[2]


def test_what_would_be_too_much_is_left_out():
    quadratic = {1024: (1.0, 1.0), 2048: (4.0, 4.0), 65536: (1e6, 1e6)}
    assert by_length.left_out(quadratic, 16384, 1e3) is None
    assert "1 s and 1 GiB" in str(by_length.left_out(quadratic, 32768, 1e3))
    assert "64 s" in str(by_length.left_out({1024: (1e3, 1.0)}, 65536, 1e3))
    assert by_length.left_out({}, 1024, 1e3) is None


def test_a_kept_figure_is_read_as_it_was():
    times = calls.Times(2.0, 1.0)
    line = rows.record("linear", None, 64, TINY_ATTENTION, rows.Result(times, times, None))
    assert rows.recorded(line) == rows.Result(times, times, None)
    assert line["shape"] == "2 heads of 8, float32"
    several = rows.about(TINY_ATTENTION._replace(tokens=128))
    assert several["shape"] == "2 heads of 8, float32, 128 tokens a call"


# An interpreter of peers, of which `hangs` hangs where `where` says, and `other` does not.
PEERS = """#!{python}
import fcntl, json, os, sys, time
_, _, _, function, request = sys.argv
request = json.loads(request)
def tell(**line):
    print(json.dumps(line), flush=True)
def work(name, where):
    tell(stage=f"{{where}} {{name}}", limit=request["limit"])
    time.sleep(60 if (name, where) == ("hangs", "{where}") else 0)
if function == "peers.attention_torch.compile_and_check":
    work(request["name"], "compile")
    tell(name=request["name"], errors=[])
else:
    tell(stage="wait", limit=None)
    fcntl.flock(lock := open(request["folder"] + "/lock", "w"), fcntl.LOCK_EX)
    for name, lengths in request["lengths"].items():
        if os.path.exists(request["folder"] + f"/{{name}}.failed"):
            continue
        for length in lengths:
            work(name, "time")
            times = dict(forward=[1, 2], gradient=[3, 4], temp_mib=None, errors=[])
            tell(name=name, of="linear", length=length, **times)
"""


@pytest.mark.parametrize("where", ["compile", "time"])
def test_a_peer_that_hangs_is_killed_and_the_next_one_asked(where, tmp_path, monkeypatch, capsys):
    """What a file has is not measured again."""
    python, saved = tmp_path / "python", tmp_path / "a.jsonl"
    python.write_text(PEERS.format(python=sys.executable, where=where))
    python.chmod(0o755)
    peers = {"hangs": names.Known("linear", 2), "other": names.Known("linear")}
    monkeypatch.setattr(attention, "PEERS", peers)
    for process in ("numbers", "ours"):
        monkeypatch.setattr(attention.Run, process, lambda *given: iter(()))
    monkeypatch.setattr(attention, "exit_if", list)
    flags = ["--tiny", "--only=linear", f"--peers={python}", f"--saved={saved}", "--limit=0.5"]
    attention.main(flags)
    seconds = "0.5"
    printed = capsys.readouterr()
    late = f"hangs, 128: TimeoutError: more than {seconds} s: {where} hangs\n"
    assert late in printed.out and f" s] {where} other" in printed.err
    for line in "other, 128: 1.000 (2.000) | ", "| other | 1.000 (2.000) | 3.000 (4.000) |":
        assert line in printed.out
    saved.open("a").write('{"machine": "cut o')
    attention.main(flags)
    printed = capsys.readouterr()
    assert "s] " not in printed.err and "| other | 1.000 (2.000) | 3.000 (4.000) |" in printed.out


@pytest.mark.parametrize("index, made", [(0, [0, 3]), (1, [1, 4, 0]), (2, [2, 0])])
def test_processes_share_the_versions_of_a_kernel(index, made, monkeypatch):
    """All are compiled by one of three, the first by each, and none is timed."""

    class Autotuner:
        def prune_configs(self, kwargs):
            return list(range(5))

        def _bench(self, *args, config):
            return self.do_bench(lambda: compiled.append(config), quantiles=(0.5, 0.2, 0.8))

    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.runtime", types.ModuleType("triton.runtime"))
    autotuner = types.SimpleNamespace(Autotuner=Autotuner)
    monkeypatch.setitem(sys.modules, "triton.runtime.autotuner", autotuner)
    triton_tuning.compile_share(index, 3)
    kernel, compiled = Autotuner(), []
    assert [kernel._bench(config=x) for x in kernel.prune_configs({})] == [[0.0] * 3] * len(made)
    assert compiled == made


def test_a_row_that_fails_costs_itself_alone(tmp_path, monkeypatch, capsys):
    """Its reason is in the file for all lengths."""

    def ask_each(asked, at_once):
        assert list(asked) == [("ours", n) for n in ("flash", "linear", "retention")]
        yield ("ours", "linear"), {"error": "RuntimeError: no"}
        times = dict(forward=[1, 2], gradient=[3, 4], temp_mib=5.0, errors=[0.0, 0.0])
        for length in (64, 128):
            yield ("ours", "retention"), {"name": "retention", "length": length} | times

    monkeypatch.setattr(side_by_side, "ask_each", ask_each)
    saved = tmp_path / "a.jsonl"
    with pytest.raises(SystemExit, match="failed: flash, linear$"):
        attention.main(["--tiny", "--only", "linear", "retention", f"--saved={saved}"])
    lines = [json.loads(line) for line in saved.read_text().splitlines()]
    assert [x["attention"] for x in lines] == ["linear"] * 2 + ["retention"] * 2
    printed = capsys.readouterr().out
    assert "| retention | 1.000 (2.000) | 3.000 (4.000) | 5 | - | - |" in printed
    assert "| linear | RuntimeError: no |" in printed


def test_a_row_does_not_wait_for_numbers_that_failed(tmp_path):
    (tmp_path / "linear.failed").write_text("MemoryError: no")
    with pytest.raises(RuntimeError, match="MemoryError: no"):
        processes.wait_for(tmp_path, "linear")
    by_length.save(tmp_path / "retention.npz", {"q": np.ones(2)})
    with np.load(processes.wait_for(tmp_path, "retention")) as arrays:
        assert arrays["q"].shape == (2,)


def test_recall_goes_on_where_a_file_ends(tmp_path, capsys, monkeypatch):
    """What the file has whole is not trained again; a line that an interruption cut is."""
    flags = ["--tiny", f"--out={tmp_path / 'out'}", "--only"]
    trained = learning(monkeypatch)
    associative_recall.main([*flags, "flash"])
    out = tmp_path / "out"
    assert trained == [(None, 16), (16, 32)]  # a length begins with the weights of the one before
    with out.open("a") as file:
        file.write('{"attention": "linear"')
    associative_recall.main([*flags, "flash", "linear", "--only_known"])
    assert len(trained) == 2 and "| linear |" not in capsys.readouterr().out
    associative_recall.main([*flags, "flash", "linear"])
    assert trained[2:] == [(None, 16), (16, 32)]
    assert "| linear | 8 | 0.2 | 50.0% | 25.0% | 0.001 | 2 | 1 |" in capsys.readouterr().out
    out.write_text("".join(out.read_text().splitlines(keepends=True)[:-1]))
    associative_recall.main([*flags, "flash", "linear"])
    assert trained[4:] == [(None, 16), (16, 32)]


def test_recall_goes_on_with_rows_that_began_alike_alone(tmp_path, monkeypatch):
    """A length that other steps of a shorter one came before is another row."""
    trained, out = learning(monkeypatch), tmp_path / "out"
    first, second = SIZES, SIZES._replace(length=32)
    list(associative_recall.models([("flash", (first, second))], MEMBERS, out))
    more = ("flash", (first._replace(steps=4), second))
    whole = out.read_text()
    list(associative_recall.models([more], MEMBERS, out))
    cut = out.read_text().splitlines(keepends=True)[:-1]  # `more` ended after its first length
    out.write_text("".join(cut))
    assert whole in out.read_text() and len(trained) == 4
    list(associative_recall.models([more], MEMBERS, out))
    assert len(trained) == 6


def test_recall_trains_as_many_steps_as_it_was_asked_for(monkeypatch):
    trained = []

    def run(params, opt_state, first, members, rows):
        trained.append((first, len(rows.tokens)))
        return params, opt_state, np.zeros(1)

    monkeypatch.setattr(recall_rows, "trainer", lambda *_: run)
    monkeypatch.setattr(recall_rows, "tester", lambda model: lambda params, rows: np.zeros(1))
    sizes = SIZES._replace(steps=5, stretch=2)
    record = recall_rows.learn((flash.flash(),), sizes, MEMBERS, None, *recall_rows._drawn(sizes))
    assert trained == [(0, 2), (2, 2), (4, 1)] and record[1]["ended_after"] == 5


def test_recall_names_any_symbol():
    sizes = SIZES._replace(vocab_size=200_000)
    drawn = recall_rows.Batches(sizes, (4,))
    inputs = drawn._task.train_batch(0, 0, 4, 16).inputs
    assert inputs.max() > 2**16
    np.testing.assert_array_equal(drawn.stretch(0).tokens[0], inputs)


@pytest.mark.parametrize(
    "flags, error",
    [
        (["--steps=1000"], "give as many of each, such as --length 512 --tokens 32768 --steps 600"),
        (["--length", "8", "512", "4096"], "--length is 8: expected at least 16, for 4 pairs"),
    ],
)
def test_recall_refuses_what_it_cannot_train(flags, error, capsys):
    for small in ([], ["--tiny"]):
        with pytest.raises(SystemExit, match="2"):
            associative_recall.main([*flags, *small])
        assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", [flags for name, flags in _of_pages() if name == "associative_recall"]
)
def test_recall_trains_what_a_page_says(flags, monkeypatch):
    asked = []
    monkeypatch.setattr(associative_recall, "models", lambda rows, *_: asked.append(rows) or rows)
    monkeypatch.setattr(associative_recall, "show", lambda *_: None)
    monkeypatch.setattr(associative_recall, "exit_if", lambda _: None)
    associative_recall.main(flags.split())
    assert all(len(stages) == 1 for _, stages in asked[0])  # figures are of one length alone


def learning(monkeypatch) -> list:
    """Recall's models learn at once: where each began, its weights being a length, and ended."""
    trained = []

    def learn(ops, sizes, members, params, batches, tests):
        trained.append((params, sizes.length))
        found = {"rate": 1e-3, "seed": 0, "accuracy": {"4": 0.5, "8": 0.25}}
        return sizes.length, found | {"ended_after": 2, "seconds": 1.0}

    monkeypatch.setattr(associative_recall, "ask", ask_here)
    monkeypatch.setattr(recall_rows, "learn", learn)
    return trained


SIZES = recall_rows.Sizes(8, 16, 64, 4, steps=2, stretch=1, n_eval=4)
MEMBERS = recall_rows.Members([1e-3], [0])


@pytest.mark.parametrize(
    "op", [flash.flash(), pytest.param(lsh.lsh(chunk_len=4), marks=pytest.mark.slow)]
)
def test_models_of_recall_side_by_side_are_those_alone(op, monkeypatch):
    """The best one counts, and a stretch that it names enough of is the last one."""
    for name in ("build", "trainer", "tester"):  # models of the same sizes share their programs
        monkeypatch.setattr(recall_rows, name, functools.cache(getattr(recall_rows, name)))
    sizes, members = SIZES._replace(steps=4, stretch=2), recall_rows.Members([1e-3, 1e-1], [0, 1])
    batches, tests = recall_rows._drawn(sizes)
    params, record = recall_rows.learn((op,), sizes, members, None, batches, tests)
    # Of the four, the two that would change places if seeds came before rates.
    for n, (rate, seed) in list(enumerate(members.each()))[1:3]:
        one = recall_rows.Members([rate], [seed])
        alone, _ = recall_rows.learn((op,), sizes, one, None, batches, tests)
        for x, y in zip(*map(jax.tree.leaves, (params, alone)), strict=True):
            np.testing.assert_allclose(x[n], y[0], rtol=2e-3, atol=2e-4)
    assert record["ended_after"] == 4 and len(record["of_each"]) == 4
    monkeypatch.setattr(recall_rows, "ENOUGH", 0.0)
    assert recall_rows.learn((op,), sizes, members, None, batches, tests)[1]["ended_after"] == 2


def ask_here(python, peer, *, patience, env, **request):
    """The answers of a peer of recall in this process."""
    answers = recall_rows.train(**json.loads(json.dumps(request)))
    return (json.loads(json.dumps(x)) for x in answers if "stage" not in x)


@pytest.mark.parametrize("limit, n", [(None, 3), (1e-9, 0)])
def test_recall_trains_a_row_in_one_process(limit, n, monkeypatch):
    """Without time left none is begun."""
    trained = learning(monkeypatch)
    rows = [(name, (SIZES,)) for name in ("flash", "linear", "routing")]
    found = dict(associative_recall.models(rows, MEMBERS, None, at_once=2, limit=limit))
    assert len(trained) == n and list(found) == rows
    assert [isinstance(x, dict) for (x,) in found.values()] == 3 * [n == 3]


def test_recall_keeps_the_claims_until_all_processes_have_ended(monkeypatch):
    there = []

    def ask(python, peer, *, claims, **request):
        yield {"row": 0, "error": "RuntimeError: no"}
        time.sleep(0.2)  # the row is known by now, and a process may still make a claim
        there.append(Path(claims).is_dir())

    monkeypatch.setattr(associative_recall, "ask", ask)
    assert len(dict(associative_recall.models([("flash", (SIZES,))], MEMBERS, None))) == 1
    assert there == [True]


def test_recall_keeps_what_is_known_of_a_process_that_is_killed(tmp_path, monkeypatch):
    def ask(python, peer, *, rows, **request):
        name, stages = rows[0]
        yield {
            "row": 0,
            "record": {"attention": name, "accuracy": {"4": 0.5}} | stages[0]._asdict(),
        }
        yield {"error": "TimeoutError: more than 3 s"}

    monkeypatch.setattr(associative_recall, "ask", ask)
    longer = SIZES._replace(length=32)
    rows, out = [("flash", (SIZES, longer)), ("linear", (SIZES, longer))], tmp_path / "out"
    found = dict(associative_recall.models(rows, MEMBERS, out, limit=3.0))
    assert found[rows[0]][0]["accuracy"] == {"4": 0.5}
    assert str(found[rows[0]][1]) == str(found[rows[1]][0]) == "TimeoutError: more than 3 s"
    assert [x["attention"] for x in lines.read(out)] == ["flash"]


def test_a_line_that_was_cut_is_left_out_and_others_go_on(tmp_path):
    file = tmp_path / "a/b.jsonl"
    assert lines.read(None) == lines.read(file) == []
    lines.add(file, {"row": {"a": 1}})
    file.write_text(file.read_text() + '{"row": {"a": 2}')
    assert lines.read(file) == [{"row": {"a": 1}}]
    lines.add(file, [3, None])
    lines.add(file, [4])
    assert lines.read(file) == [{"row": {"a": 1}}, [3, None], [4]]
    assert file.read_text().count("\n") == 4


def test_a_reason_fits_a_cell():
    text = reason(ValueError("a | b\n" + 200 * "x" + " the end"))
    assert text.startswith("ValueError: a / b x") and text.endswith("the end") and len(text) < 161


def test_the_table_has_every_attention():
    modules = (importlib.import_module(f"reformax.ops.{x.name}") for x in OP_MODULES)
    factories = {x.__name__.rpartition(".")[2] for x in modules if _makes_an_op(x)}
    assert factories <= {op.name for op in attention_table.attentions().values()}


OP_MODULES = [x for x in pkgutil.iter_modules(reformax.ops.__path__) if not x.ispkg]


def _makes_an_op(module):
    return hasattr(module, module.__name__.rpartition(".")[2])


def test_the_table_goes_on_after_a_crash(tmp_path, monkeypatch):
    """A cut line is measured again, a case that ends its process is given up, memory runs out."""
    shape = attention_table.SHAPES["tiny"]._replace(lengths=(64, 128))
    names, path = ["flash", "linear"], tmp_path / "a/table.jsonl"
    measured = []

    def programs(op, case):
        if case.length == 128 and case.masked:
            raise MemoryError("9 MiB")
        if case.attention == "flash" and case.dropout and case.masked:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying")
        return attention_table.Programs(None, None, None, None, 1.5)

    def measure(op, case, *arguments):
        measured.append(case)
        slow = case.attention == "linear" and not case.masked
        return attention_table.Figures(1.0, 2.0, 3000.0 if slow else 3.0, 1.5)

    monkeypatch.setattr(attention_table, "programs", programs)
    monkeypatch.setattr(attention_table, "measure", measure)

    def fill():
        file = attention_table.File(path)
        groups = list(attention_table.fill(file, shape, names, repeats=1))
        return file, [case for group in groups for case in group]

    file, every = fill()
    assert set(every) == set(file.known) and len(every) == 16
    found = {(*x[:2], x.dropout > 0, x.masked): y for x, y in file.known.items()}
    assert found["linear", 128, False, False].error == "left out, slow"
    assert found["linear", 64, True, False].error == "no weights to drop"
    assert found["flash", 128, False, True].error == "out of memory"
    assert found["flash", 64, True, True].error == "out of memory"
    assert found["flash", 64, True, False].combined_ms == 3.0

    written = path.read_text().splitlines(keepends=True)
    path.write_text("".join(written[:-1]) + written[-1][:-9])
    measured.clear()
    again, _ = fill()
    assert again.known == file.known and [list(x) for x in measured] == [json.loads(written[-1])[0]]
    path.write_text(json.dumps([list(every[0]), [1.0, -0.1, 0.9, 1.5, ""]]) + "\n")
    assert not attention_table.File(path).known  # of an older table
    begun = [line for line in written if line.endswith("null]\n")]
    path.write_text(begun[0] * 2)
    assert fill()[0].known[every[0]].error == "the process ended 2 times"

    attention_table.write(tmp_path, again.known, every[0].machine)
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 17


@pytest.mark.parametrize("name", ["flash", "linformer"])
def test_the_table_times_each_pass_of_its_own(name):
    shape = attention_table.SHAPES["tiny"]._replace(lengths=(64,))
    ((case,), *_) = attention_table.cases(shape, [name])
    op = attention_table.attentions()[name]
    made, given = attention_table.programs(op, case), attention_table.inputs_of(op, case)
    out, gradients = made.combined(**given)
    kept_out, kept = made.keeping(**given)
    found = kept_out, made.backward(kept)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-2), found, (out, gradients))
    figures = attention_table.measure(op, case, 1, made)
    assert min(figures.forward_ms, figures.backward_ms, figures.host_ms) > 0
    shown = figures._replace(forward_ms=0.02, backward_ms=0.5, host_ms=0.02)
    cells = [attention_table.cell(shown, f"{x}_ms") for x in ("forward", "backward")]
    assert cells == ["< 0.02", "0.50"]


@pytest.mark.slow
def test_the_table_measures_an_attention_with_weights_and_gates(tmp_path, capsys):
    flags = [f"--table={tmp_path}", "--tiny", "--repeats=1", "--lengths", "64", "--only"]
    attention.main([*flags, "linformer", "gated_linear", "routing"])
    text = (tmp_path / "table.csv").read_text()
    assert "Error" not in text and "no weights to drop" in text
    assert "| linformer | " in capsys.readouterr().out


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
