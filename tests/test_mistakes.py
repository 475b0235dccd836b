"""Mistakes and their answers: flags, settings and kinds of data, each told with what mends it.

A row is a command as a user types it, and the end of the line that it gets. `.` is a folder with
the files of `made`. All end with exit code 2: the command or its config is wrong.
"""

import ast
import errno
import json
import os
import random
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import gin
import pytest

import reformax
from reformax.cli import config, configs, evaluate, generate, parsed, statements, train
from reformax.cli import flags as flags_lib
from reformax.data import text as text_lib
from reformax.shell import in_quotes

COMMANDS = {"train": train, "evaluate": evaluate, "generate": generate}
QUICKSTART = str(configs.find("quickstart"))
TEXT = "The cat sat on the mat, and the dog ran after it.\n"

FLAGS = {
    "train --steps=5": "--config='steps=5'",
    "train --n_hashes 4": "--config='lsh.lsh.n_hashes=4'",
    "train --eval_every=10": "--config='loop.train.eval_every=10'",
    "train --output-dir=runs/a": "did you mean --output_dir; --help lists the flags",
    "train --data=mine.txt": "no flag and no setting, did you mean --data_dir; --help lists the",
    "evaluate --output_dir=runs/a --data=mine.txt": "is no flag, did you mean --data_dir; --help",
    "train --mesh=data=2": "--config='loop.train.mesh=VALUE', where VALUE is sizes above 0 of ",
    "train --eval_split=test": """--config='loop.train.eval_split="test"'""",
    "train --optimizer=adamw": "VALUE', where VALUE is an optimizer, such as optimizer.adamw()",
    "train quickstart.gin": "did you mean --config_file=quickstart.gin; --help lists the flags",
    "evaluate folder": "folder is no flag, did you mean --output_dir=folder; --help",
    "train --resume": "--resume is no flag: the same command goes on where a run stopped",
    "train --learningrate=1": "did you mean learning_rate?; --help lists the flags",
    "train mine.txt": "mine.txt is no flag, did you mean --data_dir=mine.txt; --help lists the",
    "train folder": "folder is no flag, did you mean --data_dir=folder; --help lists the flags",
    "train a_run": "a_run is no flag, did you mean --output_dir=a_run; --help lists the flags",
    "train nowhere": "nowhere is no flag: a flag is --NAME=VALUE; --help lists the flags",
    "train --config_file=reformer_tekst.gin": "did you mean reformer_text.gin",
    "train --data_dir=folder --config_file=reformer_text.gin --output_dir=./folder": "output_dir="
    "./folder is data_dir too, and a run's folder is not read as text: give another output_dir",
    "train --config_file=lora.gin": "--config_file=transformer_text.gin --config_file=lora.gin",
    "train --config_file=a_run": "a_run is a folder: give a_run/config.gin",
    "train --config_file=several": "several is a folder: give several/one/config.gin",
    "train --config_file=folder": "folder is a folder: give a config file",
    "train --config_file=qqqq.gin": "qqqq.gin; `reformax configs` lists those of the package",
    "train --config_file=lora.gin --config=d_model=8": "is a part of configs: give the config",
    "train --config_file=mine.txt": "mine.txt, line 1): The cat sat on the mat",
    "train --data_dir=mine.txt --data_dir=folder": "given twice, mine.txt and folder: give it",
    "evaluate --output_dir=mine.txt": "output_dir=mine.txt holds no run: training writes",
    "generate --output_dir=a_run/checkpoints/7": "a_run/checkpoints/7 is a checkpoint: give "
    "--output_dir=a_run --checkpoint=7",
    "evaluate --output_dir=a_run/checkpoints": "checkpoints is of a run: give --output_dir=a_run",
    "evaluate --output_dir=several": "holds the runs one, two: give one, such as "
    "--output_dir=several/one",
    "evaluate --output_dir=runs/a --split=dev": "(choose from 'train', 'valid', 'test')",
    "evaluate --output_dir=runs/a --batchsize=4": "did you mean --batch_size",
    "generate --prompt=The": "the following arguments are required: --output_dir",
    "generate --output_dir=runs/a --temperature=hot": "expected a number of at least 0",
}
SETTINGS = {
    "loop.train.named=-1": "loop.train.named is passed by the command: leave it out",
    "loop.train.config_text='x'": "loop.train.config_text is passed by the command",
    "n_hashes=4": "no config file defines n_hashes; did you mean lsh.lsh.n_hashes?",
    "stepz=10": "no config file defines stepz; did you mean steps",
    "sede=5": "no config file defines sede; did you mean seed?",
    "eval_every=5": "no config file defines eval_every; did you mean loop.train.eval_every?",
    "output_dir='a'": "loop.train.output_dir is passed by the command: leave it out",
    "steps=1e6": "steps is 1000000.0: expected a whole number",
    "lsh.lsh.n_hash=4": "has no parameter n_hash: lsh.lsh.n_hash=4; did you mean n_hashes",
    "lm.ReformerLM.attention_type=@lsh.lhs()": "did you mean lsh?",
    "lm.ReformerLM.attention_type=@flush.flash()": "flush is not the name of an imported module: "
    "lm.ReformerLM.attention_type=@flush.flash(); did you mean flash",
    "indexer.Indexer.candidates=@candidates.Hash()": "has no Hash: indexer.Indexer.candidates="
    "@candidates.Hash(); did you mean Hashed?",
    "lm.ReformerLM.attention_type=@lsh()": "lsh is a module: name a function of it: "
    "lm.ReformerLM.attention_type=@lsh(); did you mean lsh.lsh",
    "loop.train.optimizer=@optax.adam()": "optax is not the name of an imported module: "
    "loop.train.optimizer=@optax.adam(); --config='import optax' makes it one",
    "loop.train.model=@lm.ReformerLM()": "expected a model without its call, such as "
    "@lm.ReformerLM, or a function of mode",
    "lm.ReformerLM.design='llama'": "is 'llama': expected a Design, such as @designs.llama()",
    "steps=many": "--config='steps=many': expected a whole number of at least 1",
    "dtype=bf16": "expected 'float32', ",
    "lm.ReformerLM.attention_type=full": "expected an AttentionOp, such as ",
    "dtype=bfloat16": "write a text in quotes: --config='dtype=\"bfloat16\"'",
    "scan_layers=true": "expected scan_layers=True",
    "loop.train.model=lm.ReformerLM": "with an @: --config='loop.train.model=@lm.ReformerLM'",
    "loop.train.optimizer=optimizer.adam": "--config='loop.train.optimizer=@optimizer.adam()'",
    "lm.ReformerLM.attention_type=lsh": "--config='lm.ReformerLM.attention_type=@lsh.lsh()'",
    "lm.ReformerLM.attention_type=(local.local(),)": "local is no value: write a text in quotes",
    "lm.ReformerLM.attention_type=@lsh.lsh(n_hashes=4)": "lsh.lsh.n_hashes = 4: lm.ReformerLM",
    "lsh.n_hashes=2": "module.function.argument=VALUE; did you mean lsh.lsh.n_hashes?",
    "dropout=0,1": "expected one value: a number, a text in quotes, a list, or a function with",
    "steps": "expected NAME=VALUE: steps",
    '{"steps": 5}': 'expected NAME=VALUE: {"steps": 5}',
    "steps=[1, 2": "a bracket or a quote is open",
    "loop.train.accumulate=3": "batch_size=8 cannot be divided into loop.train.accumulate=3 micro",
    "vocab_size=100": "expected 256 for bytes, or 260 and more for pieces",
    "length=1000000": "the bytes that text trains on",
    "n_layers=0": "n_layers is 0: expected at least 1",
    "lm.ReformerLM.attention_type=@lsh.lsh": "attention_type is @lsh.lsh without (): expected an "
    "AttentionOp, such as @lsh.lsh(), or a cycle of them",
    "attention=(@local.local(), @lsh.lsh)": "attention is (local(), @lsh.lsh without ()): expected",
    "lm.ReformerLM.attention_type='flash'": "is 'flash': expected an AttentionOp, such as @lsh.lsh",
    "loop.train.optimizer=@optimizer.adam": "loop.train.optimizer is @optimizer.adam without (): "
    "expected an optimizer, such as @optimizer.adamw()",
    "text.text.vocabulary='none.json'": "give a tokenizer.json or a sentencepiece model",
}
DATA = {
    "nowhere.txt": ": set data_dir to a file or folder of text",
    "pictures": """convert it, choose other files by --config='text.text.pattern="*.txt"', or """
    "train on its bytes as they are with --config='text.text.raw=True'",
    "nothing": "nothing has no file that matches '*': put text files there",
    "empty.txt": "empty.txt is empty: give a file with text",
    "short.txt": "2 bytes are too few to split 90/5/5, give a text of 20 or more",
    "/dev/null": "is a device: give an ordinary file, such as one that you copied it into",
    "texts.tar": "unpack it and give the folder; or train on its bytes as they are with "
    "--config='text.text.raw=True'",
    "report.docx": "--config='text.text.raw=True'",
    "utf16.txt": "convert it, as with iconv -f UTF-16 -t UTF-8; or train on its bytes as they are "
    "with --config='text.text.raw=True'",
    "pairs": "translate them with --config_file=transformer_multi30k.gin, or choose files by "
    "text.text.pattern",
    "mine.jsonl": "it has content, set --config='text.text.field=\"content\"'",
    "dataset": "expected 'train', and 'validation' and 'test' if there are any; give the folder of "
    "one of them",
}
# A config, data of another kind, and the config for it.
WRONG_CONFIG = {
    "quickstart.gin": "mine.txt: the task reformax.data.stdlib.stdlib reads no files",
    "reformer_enwik8_800k.gin": "folder has no file enwik8",
    "transformer_multi30k.gin": "mine.txt must be a folder with the files of both languages",
    "reformer_multi30k.gin": "folder has no file val*.en",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A working directory with data of several kinds."""
    folder = tmp_path_factory.mktemp("made")
    for name in ("pictures", "pairs", "folder", "dataset", "nothing"):
        (folder / name).mkdir()
    (folder / "a_run").mkdir()
    (folder / "a_run/config.gin").touch()
    (folder / "a_run/checkpoints/7").mkdir(parents=True)
    for run in ("one", "two"):
        (folder / f"several/{run}").mkdir(parents=True)
        (folder / f"several/{run}/config.gin").touch()
    (folder / "empty.txt").touch()
    (folder / "short.txt").write_text("x\n")
    (folder / "mine.txt").write_text(TEXT * 40)
    (folder / "folder/a.txt").write_text(TEXT * 40)
    (folder / "pictures/a.png").write_bytes(random.Random(0).randbytes(2000))
    with tarfile.open(folder / "texts.tar", "w") as archive:
        archive.add(folder / "mine.txt")
    (folder / "report.docx").write_bytes(b"PK\x03\x04" + bytes(100))
    (folder / "utf16.txt").write_text(TEXT, "utf-16")
    for language in ("de", "en"):
        for split in ("train", "val", "test"):
            (folder / f"pairs/{split}.{language}").write_text(TEXT)
    (folder / "mine.jsonl").write_text(f"{json.dumps({'content': TEXT})}\n")
    (folder / "dataset/dataset_dict.json").write_text('{"splits": ["all"]}')
    return folder


@pytest.fixture
def answer(made, tmp_path, monkeypatch, call):
    """What a script prints for a mistake: one line, with exit code 2."""

    def run(script, *flags):
        monkeypatch.chdir(made)
        code, _, err = call(COMMANDS[script].main, *flags)
        lines = [line for line in err.splitlines() if line]
        assert (code, len(lines)) == (2, 1), err
        return lines[0].removeprefix("error: ")

    return run


@pytest.mark.parametrize("command", FLAGS)
def test_a_flag(command, answer, tmp_path):
    script, *flags = command.split()
    if script == "train" and "output" not in command:
        flags.append(f"--output_dir={tmp_path}")
    assert FLAGS[command] in answer(script, *flags)


@pytest.mark.parametrize("value", ["it's", 'a "b"', 'it\'s a "b"', "back\\slash", "a $HOME `b`!"])
def test_a_suggested_setting_is_one_word_of_a_shell_whatever_quotes_it_has(value, answer, tmp_path):
    """A shell gives the word back, and the config has the value."""
    line = answer("train", f"--eval_split={value}", f"--output_dir={tmp_path}")
    *_, word = shlex.split(line[line.index("--config=") :])
    text = word.removeprefix("--config=")
    assert statements.read(text, "").values == {"loop.train.eval_split": value}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps({value: TEXT})}\n")
    with pytest.raises(ValueError, match="has no text 'text'") as raised:
        text_lib.text(str(tmp_path / "a.jsonl"))
    line = str(raised.value)
    *_, word = shlex.split(line[line.index("--config=") :])
    assert statements.read(word.removeprefix("--config="), "").values == {"text.text.field": value}
    line = flags_lib.in_place_of_settings(line, "text.text", ["field"])
    assert shlex.split(line[line.index("--field=") :]) == [f"--field={value}"]


@pytest.mark.parametrize(
    "setting, flag",
    [
        ("'a.b.n=1'", "--n=1"),
        ("'a.b.n=True'", "--n"),
        ("'a.b.n=\"True\"'", "--n=True"),
        (r'"a.b.n=\"it\""', "--n=it"),
        ("'a.b.other=1'", "--config='a.b.other=1'"),
        ("'c.b.n=1'", "--config='c.b.n=1'"),
    ],
)
def test_a_flag_in_place_of_a_setting_has_its_value(setting, flag):
    line = flags_lib.in_place_of_settings(f"set --config={setting}, or not", "a.b", ["n"])
    assert line == f"set {flag}, or not"


@pytest.mark.parametrize("name", ["optax.adam", "optax.adamw"])
def test_an_argument_that_is_missing_is_named_as_a_setting(name, answer, tmp_path):
    """The config also sets arguments of an `adamw` that it then does not call."""
    settings = "import optax", f"loop.train.optimizer=@{name}()"
    flags = [f"--config={x}" for x in settings]
    line = answer("train", f"--output_dir={tmp_path}", *flags)
    assert line == (
        f"the config sets no learning_rate of {name}: give --config='{name}.learning_rate=VALUE'"
    )


def test_a_wrong_override_is_quoted_for_a_shell(answer, tmp_path):
    given = "a = 'it\"s' # don't"
    line = answer("train", f"--config={given}", f"--output_dir={tmp_path}")
    assert shlex.split(line)[0] == f"--config={given}:"


def test_what_an_error_puts_into_a_setting_is_quoted_by_a_function():
    """`in_quotes` or `config_flag`, for quotes written around a value end at one that it has."""
    by_hand = re.compile("--config=['\"][^'\"]*{}")
    for path in Path(reformax.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (x.value if isinstance(x, ast.Constant) else "{}" for x in node.values)
                assert not by_hand.search("".join(parts)), f"{path}:{node.lineno}"


@pytest.mark.parametrize("text", ["a=(1,\n2)", "a='\x1b[31mred'", "it's\t\\n", "\u2028é", "it's"])
def test_a_quoted_text_is_a_line_that_a_shell_gives_back(text):
    """And that a terminal obeys nothing in."""
    word = in_quotes(text)
    command = ["bash", "-c", f"printf %s {word}"]
    environment = os.environ | {"LC_ALL": "C.UTF-8"}
    assert word.isprintable()
    assert subprocess.check_output(command, env=environment, encoding="utf-8") == text


def test_a_path_with_spaces_is_suggested_for_a_shell(answer, made):
    (made / "my text").mkdir(exist_ok=True)
    line = answer("train", "my text")
    assert "did you mean --data_dir='my text'; --help" in line


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting(setting, answer, tmp_path):
    flags = ("--config_file=reformer_text.gin", "--data_dir=mine.txt", f"--output_dir={tmp_path}")
    assert SETTINGS[setting] in answer("train", *flags, f"--config={setting}")


@pytest.mark.parametrize(
    "typed, named",
    [
        (["lsh.lsh.n_hashes=0"], "lsh.lsh.n_hashes is 0: expected at least 1 and at most 1,024"),
        (
            ["attention=(@far/lsh.lsh(),)", "far/lsh.lsh.n_hashes=0"],
            "far/lsh.lsh.n_hashes is 0: expected at least 1 and at most 1,024 (of far/lsh)",
        ),
    ],
)
def test_a_setting_of_an_attention_is_named_as_it_was_set(typed, named, answer, tmp_path):
    """A function that a macro holds is called in a scope of the macro's name."""
    flags = ("--config_file=reformer_text.gin", "--data_dir=mine.txt", f"--output_dir={tmp_path}")
    assert answer("train", *flags, *[f"--config={x}" for x in typed]) == named


@pytest.mark.parametrize("data_dir", DATA)
def test_a_kind_of_data(data_dir, answer, tmp_path):
    flags = ("--config_file=reformer_text.gin", f"--data_dir={data_dir}")
    assert answer("train", *flags, f"--output_dir={tmp_path}").endswith(DATA[data_dir])


def test_a_misspelt_field_is_told_the_nearest(answer, tmp_path):
    (tmp_path / "a.csv").write_text("id,content\n1,one\n")
    flags = ("--config_file=reformer_text.gin", f"--data_dir={tmp_path / 'a.csv'}")
    line = answer(
        "train", *flags, f"--output_dir={tmp_path}/run", "--config=text.text.field='contnt'"
    )
    assert line.endswith("it has id, content, set --config='text.text.field=\"content\"'")


@pytest.mark.parametrize("config_file", WRONG_CONFIG)
def test_data_for_another_config(config_file, answer, tmp_path):
    data_dir = "mine.txt" if "mine.txt" in WRONG_CONFIG[config_file] else "folder"
    flags = (f"--config_file={config_file}", f"--data_dir={data_dir}", f"--output_dir={tmp_path}")
    line = answer("train", *flags)
    assert WRONG_CONFIG[config_file] in line and line.endswith("--config_file=reformer_text.gin")


def test_of_flags_that_are_no_inputs_the_last_counts():
    """As of what a wrapper adds."""
    assert train.parser().parse_args(["--output_dir=a", "--output_dir=b"]).output_dir == "b"


@pytest.mark.parametrize(
    "number, fix",
    [
        (
            errno.EACCES,
            "a 'b'/c cannot be used (Permission denied): get the right to it",
        ),
        (errno.ENAMETOOLONG, "a 'b'/c cannot be used (File name too long): give a shorter name"),
    ],
)
def test_an_error_of_the_system_has_no_number_and_a_fix(number, fix, call):
    def main():
        raise OSError(number, os.strerror(number), "a 'b'/c")

    code, _, err = call(main)
    assert code == 1 and err.startswith(f"error: {fix}") and err.count("\n") == 1

    def of_gin():
        with gin.config_scope("outer"):
            gin.external_configurable(lambda: inner(), f"outside_{number}")()

    inner = gin.external_configurable(main, f"inside_{number}")
    code, _, err = call(of_gin)
    assert code == 1 and err.startswith(f"error: {fix}") and err.count("\n") == 1
    assert err.endswith(f"(of outer/inside_{number})\n")

    def renamed():
        raise OSError(number, os.strerror(number), "a 'b'/c", None, "a -> b")

    code, _, err = call(renamed)
    assert code == 1 and err.startswith(f"error: {fix}") and err.count("\n") == 1


def test_a_folder_without_rights_is_named_and_no_file_that_is_looked_for_in_it(
    tmp_path, monkeypatch, call
):
    def main():
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / "reformax_text.json"))

    monkeypatch.setattr(os, "access", lambda *_: False)
    assert f"error: {tmp_path} cannot be used (Permission denied)" in call(main)[2]


@pytest.mark.parametrize("platforms", ["rocm", "nowhere"])
def test_a_device_that_is_not_there_is_one_line(platforms, tmp_path):
    command = [sys.executable, "-m", "reformax", "train", f"--output_dir={tmp_path / 'a'}"]
    result = subprocess.run(
        command, env={**os.environ, "JAX_PLATFORMS": platforms}, capture_output=True, text=True
    )
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: JAX_PLATFORMS={platforms}: JAX finds no such device")


def test_a_config_of_an_editor_that_marks_utf8_is_read(made, tmp_path):
    path = tmp_path / "mine.gin"
    path.write_text("include 'quickstart.gin'\nsteps = 7\n", encoding="utf-8-sig")
    config.parse([str(path)])
    assert "steps = 7" in parsed.text()
    gin.clear_config()


def test_data_for_no_config(answer):
    line = answer("train", "--config_file=reformer_text.gin")
    assert line == "the task reads files: give --data_dir"


@pytest.mark.parametrize("flag", ["--init_from=prior", "--data_dir=mine.txt"])
def test_a_task_that_is_none_is_named_whatever_flag_is_given(flag, answer, made, tmp_path):
    (made / "prior").mkdir(exist_ok=True)
    (made / "prior/vocabulary.model").touch()  # which --init_from binds to the task
    flags = ("--config_file=quickstart.gin", f"--output_dir={tmp_path}", flag)
    line = answer("train", *flags, "--config=loop.train.task=5")
    assert line == "loop.train.task is 5: expected a task, such as @text.text()"


@pytest.mark.parametrize(
    "name, value",
    [
        ("loop.train.task", "@text.text()"),
        ("lm.ReformerLM.attention_type", "@flash.flash()"),
        ("lm.ReformerLM.attention_type", "@dense.dense()"),
        ("loop.train.optimizer", "@optimizer.adam()"),
        ("loop.train.model", "@seq2seq.Reformer"),
        ("loop.train.stages", "@stages.Stage()"),
        ("loop.train.evaluations", "@evaluations.Evaluation()"),
    ],
)
def test_a_module_of_this_package_needs_no_import_line(name, value):
    config.parse([QUICKSTART], [f"{name}={value}"])
    assert str(gin.query_parameter(name)).removeprefix("@").endswith(value[1:])


def test_a_module_of_one_s_own_that_has_the_name_of_ours_is_taken_by_an_import_line(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.py").write_text("def text(data_dir=None):\n    return 'mine'\n")
    setting = "loop.train.task = @text.text()\n"
    (tmp_path / "ours.gin").write_text(f"include 'quickstart.gin'\n{setting}")
    (tmp_path / "mine.gin").write_text(f"import text\ninclude 'quickstart.gin'\n{setting}")
    monkeypatch.delitem(sys.modules, "text", raising=False)
    for file, module in (
        ("ours.gin", "from reformax.data import text"),
        ("mine.gin", "import text"),
    ):
        config.parse([file])
        assert module in gin.config_str().splitlines()
        note = "note: text is reformax.data.text and not text.py in this folder, which a line "
        note += "`import text` in the config file takes\n"
        assert capsys.readouterr().err == (note if file == "ours.gin" else "")
    monkeypatch.delitem(sys.modules, "text")


def test_a_module_of_the_working_directory_is_found(made, monkeypatch):
    (made / "mytask.py").write_text(
        "from reformax.data import text\n\n\ndef mine(n_times=40):\n"
        "    raise ValueError(f'{n_times} times')\n"
    )
    from reformax.training import loop

    monkeypatch.chdir(made)
    (made / "own.gin").write_text(
        "from __gin__ import dynamic_registration\nfrom reformax.training import loop\n"
        "import mytask\nloop.train.task = @mytask.mine()\nmytask.mine.n_times = 3\n"
    )
    for files, overrides in (
        ([str(made / "own.gin")], []),
        ([QUICKSTART], ["loop.train.task=@mytask.mine()", "mytask.mine.n_times=3"]),
    ):
        config.parse(files, overrides)
        with pytest.raises(ValueError, match="3 times"):
            parsed.bindings(loop.train, ["task"])
        assert "import mytask" in gin.config_str()
    include = "include 'quickstart.gin'\n"
    for head in (include, f"import mytask\n{include}", f"{include}import mytask\n"):
        (made / "bare.gin").write_text(f"{head}loop.train.task = @mytask.mine()\n")
        config.parse([str(made / "bare.gin")])
        text = gin.config_str()
        assert "import mytask" in text
        config.parse_saved(text, "config.gin", trusted=True)
        assert gin.config_str() == text
