"""The commands of the benchmarks: they run, and take the flags that pages give."""

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

from benchmarks import generation, global_layers, reversible, step
from tests import pages

ROOT = Path(__file__).resolve().parents[2]


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
    ("float8", "", "| float8, amax_history=16 | "),
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


def test_a_seed_below_0_is_refused(capsys):
    with pytest.raises(SystemExit):
        global_layers.main(["--tiny", "--seed=-1"])
    assert "argument --seed: -1: expected at least 0" in capsys.readouterr().err


@pytest.mark.parametrize("name, flags", pages.benchmarks())
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


def test_no_benchmark_imports_another():
    folder = Path(step.__file__).parent
    files = [*folder.glob("*.py"), *folder.glob("*/*.py")]
    assert len(files) > 15
    for path in files:
        for imported in re.findall(r"from benchmarks(\S*) import (.*)", path.read_text()):
            own = (".reliability",) if path.parent.name == "reliability" else ()
            shared = (".harness", ".peers", ".rows", *own)
            assert imported[0].startswith(shared), (path, imported)


@pytest.mark.parametrize("flag", ["--repeats=0", "--repeats=-1"])
def test_a_number_of_calls_below_1_is_refused(flag, capsys):
    with pytest.raises(SystemExit):
        step.main(["--tiny", flag])
    assert "argument --repeats" in capsys.readouterr().err
