"""What an error names, typed back into the command, is accepted."""

import functools
import re
import subprocess
import sys

import pytest

from reformax.cli import config, errors, lookup, messages, parsed, report, typed
from reformax.training import loop
from reformax.training.settings import TrainSettings, build

SMALL = ["n_layers=2", "steps=20", "batch_size=2", "length=64", "warmup_steps=2"]
NAMED = re.compile(r"(?<![\w./@%('\"=-])([a-z_][\w.]*)=((?:'[^']*'|\([^)]*\)|[\w.-])+)")

# Wrong settings, and what mends them as the error says it, in full.
MENDED = {
    ("optimizer.cosine.steps=5", "warmup_steps=99999"): "warmup_steps=0",
    ("optimizer.cosine.steps=20", "optimizer.cosine.warmup_steps=30"): (
        "optimizer.cosine.warmup_steps=2"
    ),
    (
        "lm.ReformerLM.next_value=True",
        "lm.ReformerLM.attention_type=@flash.flash()",
    ): "lm.ReformerLM.next_value=False",
    (
        "lm.ReformerLM.pos_type='alibi'",
        "lm.ReformerLM.attention_type=@lsh.lsh()",
        "lm.ReformerLM.next_value=False",
    ): "lm.ReformerLM.attention_type=@flash.flash()",
    ("lm.ReformerLM.first_token=256",): None,
    ("lm.ReformerLM.tie_embeddings=True",): None,
    (
        "lm.ReformerLM.pos_type='axial'",
        "lm.ReformerLM.pos_axial_shape=(8, 8)",
        "lm.ReformerLM.pos_d_axial_embs=(1, 2)",
    ): None,
    ("lm.ReformerLM.n_kv_heads=2", "lm.ReformerLM.attention_type=@lsh.lsh()"): None,
    ("loop.train.eval_stride=9999",): None,
    ("loop.train.fresh_heads=True",): None,
    ("loop.train.fresh_ops=True",): None,
    ("n_heads=0",): None,
    ("lsh.lsh.n_hashes=0",): None,
}


@pytest.fixture
def told(monkeypatch, capsys):
    """The error of a command with these settings, or an empty text."""

    def call(*settings, file="quickstart.gin"):
        def main():
            config.parse([str(file)], [*SMALL, *settings])
            found = parsed.bindings(loop.train)
            given = TrainSettings(**found)
            import jax

            shape = (given.batch_size, given.length)
            model = build(given.model, "train")
            jax.eval_shape(lambda key: model.init_params(key, shape), jax.random.key(0))
            return 0

        monkeypatch.setattr(sys, "argv", ["train.py"])
        code = errors.exit_code(main)
        out, err = capsys.readouterr()
        assert (code == 0) == (err == "") and err.count("\n") <= 1, err
        return err

    return call


def typed_back(line):
    """The settings NAME=VALUE that a line names outside of calls and quotes."""
    return [f"{name}={value.rstrip('.')}" for name, value in NAMED.findall(line)]


@pytest.mark.parametrize("settings", MENDED, ids=" ".join)
def test_each_setting_that_an_error_names_is_accepted(settings, told):
    line = told(*settings)
    assert line.startswith("error: ")
    for one in typed_back(line):
        again = told(*settings, one)
        for refusal in ("is no", "no config file defines", "has no parameter", "did you mean"):
            assert refusal not in again, (line, one, again)
    if fix := MENDED[settings]:
        name = fix.partition("=")[2] if fix.partition("=")[2].startswith("@") else fix
        assert name in line, line
        assert told(*settings, fix) == "", line


# Settings of a saved run that are wrong, by the argument that the error is to name.
WRONG_OF_A_RUN = {
    "lm.ReformerLM.pos_d_axial_embs": (
        "lm.ReformerLM.pos_type='axial'",
        "lm.ReformerLM.pos_axial_shape=(8, 8)",
        "lm.ReformerLM.pos_d_axial_embs=(1, 2)",
    ),
    "lm.ReformerLM.next_value": (
        "lm.ReformerLM.next_value=True",
        "lm.ReformerLM.attention_type=@flash.flash()",
    ),
    "lsh.lsh.n_hashes": ("lsh.lsh.n_hashes=0",),
    "lm.ReformerLM.n_heads": ("lm.ReformerLM.n_heads=0",),
}


class Accepted(Exception):
    """The settings were read, the model is built, and its weights are read next."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run's folder with a config and a checkpoint, whose weights no test reads."""
    import numpy as np

    from reformax.training.checkpoint import Checkpoints

    folder = tmp_path_factory.mktemp("saved") / "run"
    config.parse(["quickstart.gin"], SMALL)
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.gin").write_text(parsed.text())
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, {"w": np.zeros(3)}, None, parsed.text())
    checkpoints.wait()
    checkpoints.close()
    return str(folder)


@pytest.fixture
def error_of(saved, monkeypatch, capsys, tmp_path):
    """The error of a command that reads the run, or a sweep, with settings; '' if it has none."""
    from reformax import load_run
    from reformax.cli import evaluate, generate, sweep
    from reformax.training import averaging

    def restored(*_):
        raise Accepted

    monkeypatch.setattr(averaging, "restore_mean", restored)

    def call(command, *settings):
        if command == "load_run":
            try:
                load_run(saved, overrides=settings)
            except ValueError as error:
                return str(error)
            except Accepted:
                return ""
        overrides = [f"--config={setting}" for setting in settings]
        if command == "sweep":
            (tmp_path / "grid.gin").write_text("include 'quickstart.gin'\nsteps = [20]\n")
            monkeypatch.setattr(sweep, "_run", lambda *_: 0)
            monkeypatch.setattr(sweep, "_show", lambda *_: None)
            flags = ["grid.gin", *(f"--config={x}" for x in SMALL if not x.startswith("steps"))]
            monkeypatch.chdir(tmp_path)
        else:
            flags = [f"--output_dir={saved}"] + ["--prompt=a"] * (command == "generate")
        main = {"evaluate": evaluate, "generate": generate, "sweep": sweep}[command].main
        monkeypatch.setattr(sys, "argv", [command])
        capsys.readouterr()
        try:
            code = errors.exit_code(lambda: main([*flags, *overrides]))
        except Accepted:
            return ""
        err = capsys.readouterr().err
        assert (code == 0) == (err == "") and err.count("\n") <= 1, err
        return err

    return call


@pytest.mark.parametrize("name", WRONG_OF_A_RUN)
@pytest.mark.parametrize("command", ["evaluate", "generate", "load_run", "sweep"])
def test_each_command_names_settings_as_it_takes_them(command, name, error_of):
    settings = WRONG_OF_A_RUN[name]
    line = error_of(command, *settings).removeprefix("error: ")
    macros = {"lm.ReformerLM.n_heads": "n_heads"}
    assert macros.get(name, name) in line, line
    named = typed_back(line)
    if found := re.match(r"(?:steps=20: )?([\w.]+) (?:is |\()", line):
        value = next((x for x in settings if x.startswith(name)), "=0").partition("=")[2]
        named.append(f"{found[1]}={value}")
    if name == "lm.ReformerLM.next_value":
        assert error_of(command, *settings, f"{name}=False") == ""
    for one in named:
        if command == "sweep" and one.startswith("steps="):
            continue  # the run's name
        again = error_of(command, *settings, one)
        for refusal in ("is no flag", "no config file defines", "has no parameter", "did you mean"):
            assert refusal not in again, (line, one, again)


def test_names_of_flags_stay():
    """`seed` is a flag of evaluate.py and a setting of the run."""
    config.parse(["quickstart.gin"])
    assert typed.typed("an op, such as dense.dense()") == "an op, such as @dense.dense()"
    line = "seed is 3: set eval_stride=1"
    assert typed.typed(line).startswith("loop.train.seed is 3: set loop.train.eval_stride=1")
    assert typed.typed(line, flags=["seed"]) == "seed is 3: set loop.train.eval_stride=1"


@pytest.mark.parametrize("dry", [[], ["--dry_run"]], ids=["run", "dry run"])
@pytest.mark.parametrize("given", ["nowhere", "~no_such_user/run"])
def test_a_flag_that_sets_the_config_is_named_as_a_flag(given, dry, tmp_path, monkeypatch, call):
    """`init_from` is an argument of `loop.train` too, which the user has not typed."""
    from reformax.cli import train

    monkeypatch.chdir(tmp_path)
    args = ["--config_file=quickstart.gin", f"--init_from={given}", *dry]
    args += [f"--config={setting}" for setting in SMALL]
    code, _, err = call(lambda: train.main(args))
    assert code == 2 and "loop.train.init_from" not in err, err
    assert err.startswith(("error: --init_from=nowhere holds", "error: --init_from is '~no")), err


def test_a_flag_keeps_its_name_beside_settings_of_the_same_name(call):
    from reformax.cli import flags
    from reformax.declared import Size

    parser = flags.parser("")
    parser.add_argument("--length", type=flags.of(Size))

    def main():
        parser.parse_args(["--length=5"])
        raise ValueError("length=5, eval_length=5, --length=5, a.length=5, length=50, length is 5")

    assert call(main)[2] == (
        "error: --length=5, eval_length=5, --length=5, a.length=5, length=50, --length is 5\n"
    )


def test_a_flag_of_another_name_than_its_value_has(tmp_path, call):
    from reformax.convert import __main__ as convert

    code, _, err = call(lambda: convert.main(["--from=~no_such_user/a", f"--to={tmp_path / 'b'}"]))
    assert code == 2 and err.startswith("error: --from is '~no_such_user/a': "), err


def test_the_errors_of_runs_name_no_setting(tmp_path, monkeypatch, capsys):
    """`reformax runs` takes folders and flags alone."""
    from reformax.cli import runs

    monkeypatch.setattr(sys, "argv", ["reformax runs"])
    for given in ([str(tmp_path)], [str(tmp_path), "--x=hours"], ["--config=steps=3"]):
        assert errors.exit_code(lambda g=given: runs.main(g)) == 2
        line = capsys.readouterr().err.replace("--config=steps=3", "")
        assert line.count("\n") == 1 and not typed_back(line), line


@pytest.mark.parametrize(
    "file",
    ["quickstart.gin", pytest.param("transformer_enwik8_800k.gin", marks=pytest.mark.slow)],
)
def test_every_argument_is_named_as_it_is_typed(file):
    """Each argument of a config, set to what it cannot be: the error's names are settings."""
    parse = functools.partial(config.parse, [file])
    parse()
    arguments, refused = lookup.arguments(), 0
    assert len(arguments) > 60
    for argument in arguments:
        if argument.endswith((".task", ".config_text", ".output_dir")) or ".train." in argument:
            continue
        for value in ("-1", "'nonsense'"):
            parse([f"{argument}={value}"])
            try:
                found = parsed.bindings(loop.train, ("model", "optimizer"))
                build(found["model"], "train")
            except ValueError as error:
                line = typed.typed(errors.one_line(error), messages.owner_of(error))
                refused += 1
                for one in typed_back(line):
                    parse([one])  # raises for a name that is none
                name = re.match(r"([\w.]+) is ", line)
                if name:
                    parse([f"{name[1]}={value}"])
            except Exception as error:
                raise AssertionError(f"{argument}={value}") from error
    assert refused > 60


def test_a_file_needs_no_import_line_and_its_imports_are_its_own(tmp_path):
    (tmp_path / "mine.gin").write_text("""loop.train.model = @lm.ReformerLM
lm.ReformerLM.attention_type = @hashing.lsh()
include 'theirs.gin'
""")
    (tmp_path / "theirs.gin").write_text("""from __gin__ import dynamic_registration
from reformax.ops import lsh as hashing
hashing.lsh.n_hashes = 2
""")
    with pytest.raises(config.ConfigError, match="^hashing is not the name of an imported module"):
        config.parse([str(tmp_path / "mine.gin")])
    (tmp_path / "mine.gin").write_text("""include 'theirs.gin'
loop.train.model = @lm.ReformerLM
lm.ReformerLM.attention_type = @lsh.lsh()
""")
    config.parse([str(tmp_path / "mine.gin")])
    text = parsed.text()
    config.parse_saved(text, "config.gin")
    assert parsed.text() == text
    assert parsed.described(loop.train, "model").arguments["attention_type"].arguments == {
        "n_hashes": 2
    }


def test_a_short_name_is_a_setting_of_the_command_line():
    config.parse(["transformer_text.gin"], ["seed=3", "ff_chunk_size=64"])
    lines = parsed.text().splitlines()
    assert "lm.TransformerLM.ff_chunk_size = %ff_chunk_size" in lines and "seed = 3" in lines
    assert parsed.bindings(loop.train, {"seed"}) == {"seed": 3}


def test_a_file_that_names_no_training(tmp_path):
    """In a process in which no other did."""
    (tmp_path / "mine.gin").write_text("lm.ReformerLM.d_model = 32\n")
    parse = f"config.parse(['{tmp_path}/mine.gin'], ['seed=2'])"
    code = f"from reformax.cli import config, parsed\n{parse}\nprint(parsed.text())"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_model_and_task_are_short_names(tmp_path):
    (tmp_path / "mine.gin").write_text(
        "include 'byte_lm.gin'\nmodel = @lm.ReformerLM\ntask = @text.text()\nn_slots = 3\n"
    )
    config.parse([str(tmp_path / "mine.gin")], data_dir="mine.txt")
    lines = parsed.text().splitlines()
    assert {"text.text.data_dir = 'mine.txt'", "lm.ReformerLM.n_slots = %n_slots"} <= {*lines}


def test_a_short_name_of_what_the_config_sets_is_told(tmp_path):
    for name, line in {
        "eval_every": "eval_every = 5",
        "task": "task = @stdlib.stdlib()",
        "attention": "attention = @lsh.lsh()\nlm.ReformerLM.attention_type = @local.local()",
    }.items():
        base = "reformer_text.gin" if name != "attention" else "byte_lm.gin"
        text = f"include '{base}'\nloop.train.model = @lm.ReformerLM\n{line}\n"
        (tmp_path / "mine.gin").write_text(text)
        with pytest.raises(config.ConfigError, match=rf"sets {name}, .*; did you mean \w+\.\w"):
            config.parse([str(tmp_path / "mine.gin")])


@pytest.mark.parametrize("beside", [True, False])
def test_a_file_that_is_named_as_one_of_ours(beside, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path if beside else tmp_path / "mine"
    folder.mkdir(exist_ok=True)
    ours = "include 'transformer_enwik8_windows_38m.gin'\nsteps = 7\n"
    (folder / "windows.gin").write_text(ours)
    (folder / "reformer.gin").write_text("include 'reformer.gin'\nlength = 7\n")
    for name, setting in (("windows.gin", "steps = 7"), ("reformer.gin", "length = 7")):
        config.parse([str(folder / name)])
        assert setting in parsed.text()
    (folder / "a.gin").write_text("include 'b.gin'\n")
    (folder / "b.gin").write_text("include 'a.gin'\n")
    with pytest.raises(config.ConfigError, match="a file includes itself"):
        config.parse([str(folder / "a.gin")])


@pytest.mark.parametrize("own", [True, False])
def test_the_next_line_has_the_flag_that_it_needs(own, tmp_path, monkeypatch, capsys):
    import shlex

    folder = tmp_path / "with 'quotes' and spaces"
    folder.mkdir()
    names = "import mine\nloop.train.model = @mine.Model\n" if own else ""
    (folder / "config.gin").write_text(
        "from __gin__ import dynamic_registration\nfrom reformax.training import loop\n" + names
    )
    result = {"output_dir": str(folder), "interrupted_by": None, "step": 1, "steps": 1}
    result |= {"metric": "bits_per_dim", "whole": True, "best_whole": True, "eval_split": "valid"}
    result |= {"bits_per_dim": 1.0, "best_bits_per_dim": 1.0, "best_step": 1, "n_targets": 4}
    monkeypatch.setattr(sys, "argv", ["reformax train"])
    assert report.training(result | {"bits_per_byte": 1.0}, with_curve=False) == 0
    lines = capsys.readouterr().out.splitlines()[-2:]
    for line, name in zip(lines, ("what it writes: ", "next: "), strict=True):
        words = shlex.split(line.removeprefix(name))
        assert words[:3] == ["reformax", line[len(name) :].split()[1], f"--output_dir={folder}"]
        assert ("--trust_config" in words) == own
    assert report.training(result, with_curve=False) == 0
    assert "what it writes" not in capsys.readouterr().out


@pytest.mark.parametrize("task, chats", [("chats.chats", True), ("stdlib.stdlib", False)])
def test_the_line_of_what_a_run_writes_asks_one_of_chats(task, chats, tmp_path, capsys):
    config.parse([], [f"loop.train.task=@{task}()"])
    result = {"output_dir": str(tmp_path), "interrupted_by": None, "step": 1, "steps": 1}
    result |= {"metric": "bits_per_dim", "whole": True, "best_whole": True, "eval_split": "valid"}
    result |= {"bits_per_dim": 1.0, "best_bits_per_dim": 1.0, "best_step": 1, "bits_per_byte": 1.0}
    assert report.training(result, with_curve=False) == 0
    said = capsys.readouterr().out
    assert ("what it writes: " in said) and ("--chat '--prompt=Who are you?'" in said) == chats


def test_a_short_name_is_the_argument_of_the_model_and_of_training(tmp_path):
    (tmp_path / "mine.gin").write_text("""from __gin__ import dynamic_registration
from reformax.models import lm
from reformax.training import loop
from reformax.training import stages
include 'transformer.gin'
d_head = 48
n_slots = 6
loop.train.length = 77
loop.train.stages = (@first/stages.Stage(),)
first/stages.Stage.model = @lm.ReformerLM
lm.ReformerLM.dropout = 0.25
""")
    given = ["d_head=24", "lm.TransformerLM.d_attention_value=8", "steps=7"]
    config.parse([str(tmp_path / "mine.gin")], given)
    lines = parsed.text().replace("train.", "loop.train.").splitlines()
    for name, macro in {
        "lm.TransformerLM.d_attention_key": "d_head",
        "lm.TransformerLM.vocab_size": "vocab_size",
        "lm.TransformerLM.attention_type": "attention",
        "lm.ReformerLM.d_attention_value": "d_head",  # of a stage
        "lm.ReformerLM.n_slots": "n_slots",
        "loop.train.steps": "steps",
    }.items():
        assert any(line.endswith(f"{name} = %{macro}") for line in lines), name
    own = {"lm.TransformerLM.d_attention_value = 8", "lm.ReformerLM.dropout = 0.25"}
    assert own <= set(lines) and "d_head = 24" in lines  # what the config sets itself stays
    assert any(line.endswith("loop.train.length = 77") for line in lines)
    assert not any(line.startswith("lm.TransformerLM.n_slots") for line in lines)


# A run's config, as `train` writes it: what a macro holds is set in a scope of its name.
SCOPED = """from __gin__ import dynamic_registration
from reformax.models import lm
from reformax.ops import local
from reformax.ops import lsh
from reformax.training import loop

attention = (@local.local(), @near/local.local(), @lsh.lsh())
loop.train.model = @lm.ReformerLM
lm.ReformerLM.attention_type = %attention
lm.ReformerLM.vocab_size = 8
attention/local.local.chunk_len = 16
near/local.local.chunk_len = 8
attention/lsh.lsh.n_hashes = 2
"""


@pytest.mark.parametrize(
    "overrides, chunk_lens, n_hashes, unused",
    [
        ([], [16, 8], 2, []),
        (["lsh.lsh.n_hashes=4"], [16, 8], 4, []),
        (["attention/lsh.lsh.n_hashes=4"], [16, 8], 4, []),
        (
            ["lsh.lsh.n_hashes=4", "attention/lsh.lsh.n_hashes=3"],
            [16, 8],
            3,
            ["lsh.lsh.n_hashes=4"],
        ),
        (["local.local.chunk_len=4"], [4, 8], 2, []),
        (["near/local.local.chunk_len=4"], [16, 4], 2, []),
        (["far/local.local.chunk_len=4"], [16, 8], 2, ["far/local.local.chunk_len=4"]),
        (
            ["attention=(@near/local.local(), @near/local.local(), @lsh.lsh())"]
            + ["local.local.chunk_len=4"],
            [8, 8],
            2,
            ["local.local.chunk_len=4"],
        ),
    ],
)
def test_an_override_reaches_what_the_macros_of_a_run_hold(overrides, chunk_lens, n_hashes, unused):
    config.parse_saved(SCOPED, "config.gin", overrides)
    cycle = parsed.bindings(loop.train)["model"]().attention_type
    assert [op.chunk_len for op in cycle[:2]] == chunk_lens and cycle[2].n_hashes == n_hashes
    assert parsed.unused(overrides) == unused
