"""What the comments of configs tell a user to type is accepted: nothing is trained."""

import functools
import json
import re
import shlex

import jax
import pytest

from reformax.buffers import trained
from reformax.cli import config, configs, dummy_task, evaluate, parsed, train
from reformax.training import dry_run, first_state, run_setup
from reformax.training.settings import TrainSettings

# A value has no mark of a sentence at its end.
VALUE = r"""(?:'[^']*'|"[^"]*"|[^\s'"]*[^\s'".,;:)])+"""
FLAGS = rf"--\w+(?:={VALUE})?(?: --\w+(?:={VALUE})?)*"
COMMAND = re.compile(rf"python (train|evaluate)\.py( {FLAGS})?")
PARSERS = {"train": train.parser, "evaluate": evaluate.parser}
INCLUDE = re.compile(r"^include '(.+)'", re.M)


def commands_of(text):
    """The commands in the header of a config, as (script, words)."""
    for found in COMMAND.finditer(configs.leading_comment(text)):
        yield found[1], words_of(found[2] or "")


def alternatives_of(text):
    """The words of flags that its header names outside commands, where they set something."""
    comment = COMMAND.sub("", configs.leading_comment(text))
    found = map(words_of, re.findall(FLAGS, comment))
    return [words for words in found if any(word.startswith("--config=") for word in words)]


def words_of(flags):
    """The words of flags, which a shell reads as they stand."""
    unquoted = re.sub(VALUE.partition("|[^")[0] + ")", "", flags)
    assert not set(unquoted) & set("()*?<>|&;$`"), f"a shell would not read {flags}: quote it"
    return shlex.split(flags)


@functools.cache
def with_parts(path):
    """The text of a config, and those of the files that it includes."""
    text = path.read_text()
    parts = [part for name in INCLUDE.findall(text) for part in with_parts(configs.find(name))]
    return [text, *parts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of rows with authors, and of sources of Python."""
    folder = tmp_path_factory.mktemp("texts")
    rows = [{"author": f"A{i % 3}", "text": f"row {i} of a text\n" * 9} for i in range(3_000)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "one.py").write_text("x = 1\n" * 50_000)
    return folder


def unused(path, args, folder):
    """Builds a run of the flags; returns the settings that it does not use."""
    reads = any(one.startswith("text.text.") for one in args.config)
    data_dir = str(folder) if reads else None
    config.parse([str(path)], args.config, data_dir=data_dir, init_from=args.init_from)

    def check(has_data=True, **options):
        del has_data
        dry_run.check(**options)
        return iter(())

    options, notes = dummy_task.reported(check)
    has_text = not list(notes)
    found = parsed.unused(args.config, [f"loop.train.{name}" for name in options])
    return [one for one in found if has_text or not one.startswith("text.text.")]


@pytest.mark.parametrize("path", configs.runs(), ids=lambda path: path.stem)
def test_a_run_with_the_flags_of_its_config_s_header_begins(path, folder):
    text, *parts = with_parts(path)
    first = next(words for script, words in commands_of(text) if script == "train")
    for words in ([], *(one for part in (text, *parts) for one in alternatives_of(part))):
        args = train.parser().parse_args([*first, *words])
        try:
            assert unused(path, args, folder) == [], words
        except (ValueError, config.ConfigError) as error:
            pytest.fail(f"{shlex.join(words)}: {error}")


@pytest.mark.parametrize("path", sorted(configs.FOLDER.rglob("*.gin")), ids=lambda path: path.stem)
def test_the_commands_of_a_header_have_flags_that_there_are(path):
    for script, words in commands_of(path.read_text()):
        _, unknown = PARSERS[script]().parse_known_args(words)
        assert not unknown


def test_no_flag_of_a_header_is_overlooked():
    for path in configs.FOLDER.rglob("*.gin"):
        text = path.read_text()
        found = [words for _, words in commands_of(text)] + alternatives_of(text)
        n_settings = sum(word.startswith("--config=") for words in found for word in words)
        assert n_settings == configs.leading_comment(text).count("--config="), path.name


COUNT = re.compile(r"([\d.]+) (million|billion) parameters")


def counted(path):
    """The number of parameters that a header says first, as its words; None for none."""
    comment = configs.leading_comment(path.read_text())
    return COUNT.search(" ".join(line.lstrip("# ") for line in comment.splitlines()))


@pytest.mark.parametrize(
    "path", [x for x in configs.runs() if counted(x)], ids=lambda path: path.stem
)
def test_the_number_of_parameters_of_a_header_is_the_models(path):
    config.parse([str(path)])
    settings = TrainSettings(**dummy_task.reported(lambda **settings: iter(()))[0])
    models = run_setup.models_of(settings)
    _, like = first_state.first_states(settings, models, jax.random.PRNGKey(0))
    found = sum(x.size for x in jax.tree.leaves(trained(like.params)))
    digits, unit = counted(path).groups()
    size = {"million": 1e6, "billion": 1e9}[unit]
    half_a_digit = 0.5 * 10.0 ** -len(digits.partition(".")[2])
    assert abs(found / size - float(digits)) <= half_a_digit, f"{found:,}"
