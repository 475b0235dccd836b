"""evaluate.py and generate.py of models that translate: text, numbers, files, scores, mistakes."""

import codecs
import csv
import io
import json
import shutil
import sys

import pytest

import evaluate
import generate
import train
from reformax import durable
from reformax.cli import distributed, errors, translations

RUN = """
from __gin__ import dynamic_registration
from reformax.data import reverse
from reformax.data import text_pairs
from reformax.models import seq2seq
from reformax.training import loop
from reformax.training import optimizer

loop.train.model = @seq2seq.Transformer
loop.train.task = @text_pairs.text_pairs()
text_pairs.text_pairs.data_dir = 'pairs'
text_pairs.text_pairs.vocab_size = 16
text_pairs.text_pairs.model_type = 'char'
reverse.reverse.max_symbols = 5
reverse.reverse.vocab_size = 16
reverse.reverse.n_eval = 4
loop.train.optimizer = @optimizer.adam()
optimizer.adam.learning_rate = 3e-2
loop.train.steps = 60
loop.train.batch_size = 8
loop.train.length = 16
seq2seq.Transformer.input_vocab_size = 16
seq2seq.Transformer.d_model = 8
seq2seq.Transformer.d_ff = 8
seq2seq.Transformer.n_encoder_layers = 1
seq2seq.Transformer.n_decoder_layers = 1
seq2seq.Transformer.n_heads = 2
"""
WORDS = ["abba", "cab", "a b c", "", "dach", "bad gag"]
FAST = ["--beam_size=2", "--max_extra=3"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the run `text` and its pairs."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "pairs").mkdir()
        for split in ("train", "val", "test"):
            lines = [w for w in WORDS if w or split == "test"]
            (folder / f"pairs/{split}.en").write_text("\n".join(lines) + "\n")
            (folder / f"pairs/{split}.de").write_text("\n".join(x[::-1] for x in lines) + "\n")
        (folder / "run.gin").write_text(RUN)
        train_here(patch, "text")
    return folder


def train_here(patch, name, *flags):
    """The run of the config, in a folder of this name."""
    argv = ["train.py", "--config_file=run.gin", f"--output_dir={name}", *flags]
    patch.setattr(sys, "argv", argv)
    assert errors.exit_code(train.main) == 0


@pytest.fixture
def run(runs, monkeypatch, call):
    """`(exit code, stdout, stderr)` of a script with a standard input."""
    monkeypatch.chdir(runs)

    def run(main, *flags, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        return call(main, *flags)

    return run


@pytest.mark.slow
def test_an_evaluation_translates_and_scores(run, runs, monkeypatch):
    code, out, err = run(evaluate.main, "--output_dir=text", "--split=test", *FAST)
    assert code == 0, err
    result = json.loads((runs / "text/evaluation_test.json").read_text())
    assert result["n_sentences"] == len(WORDS) and result["beam_size"] == 2
    assert 0 < result["bits_per_token"] < 10
    for name in ("bleu", "bleu_uncased"):
        assert f"{name}: {result[name]:.2f} ({result[f'{name}_signature']})" in out
    assert "case:mixed" in result["bleu_signature"]
    texts = (runs / "text/translations_test.txt").read_text().split("\n")[:-1]
    with (runs / "text/translations_test.tsv").open(newline="") as file:
        rows = list(csv.DictReader(file, dialect="excel-tab"))
    assert [row["translation"] for row in rows] == texts
    assert texts[3] == "" and any(texts)
    assert [row["source"] for row in rows] == WORDS
    assert [row["reference"] for row in rows] == [w[::-1] for w in WORDS]
    same = [row["translation"] == row["reference"] for row in rows]
    assert result["exact"] == sum(same) / len(same)
    # generate.py says the same, line for line, from a file or from standard input.
    source = "".join(f"{w}\n" for w in WORDS)
    (runs / "source.txt").write_text(source)
    flags = ["--output_dir=text", *FAST]
    code, out, err = run(generate.main, *flags, "--prompt_file=source.txt")
    assert code == 0 and out.split("\n")[:-1] == texts and "6 lines, " in err
    assert run(generate.main, *flags, stdin=source.encode())[1] == out
    assert run(generate.main, *flags, "--prompt=cab", "--prompt=")[1] == f"{texts[1]}\n\n"
    assert run(generate.main, *flags, "--prompt=cab")[2].startswith("1 line, ")
    marked = codecs.BOM_UTF8 + source.encode()
    assert run(generate.main, *flags, stdin=marked)[1] == out
    assert run(generate.main, *flags, stdin=b"")[:2] == (0, "")
    # A block at a time, with what the model has not been trained on counted.
    monkeypatch.setattr(translations, "LINES", 4)
    code, blocks, err = run(generate.main, *flags, stdin=f"{source}{'a' * 20}\n".encode())
    assert code == 0 and blocks.count("\n") == 7 and "note: 1 line of more than 16 tokens" in err


@pytest.mark.slow
def test_numbers(run, runs, monkeypatch):
    train_here(monkeypatch, "numbers", "--config=loop.train.task=@reverse.reverse()")
    flags = ["--output_dir=numbers", *FAST]
    code, out, err = run(evaluate.main, *flags, "--split=valid", "--length_penalty=0")
    assert code == 0, err
    result = json.loads((runs / "numbers/evaluation_valid.json").read_text())
    assert result["length_penalty"] == 0
    assert f"exact: {result['exact']:.4f} of 4 sentences" in out
    code, out, err = run(generate.main, *flags, "--prompt=3 4 5", "--quiet")
    assert (code, err) == (0, "") and all(3 <= int(word) < 16 for word in out.split())
    code, _, err = run(generate.main, *flags, "--prompt=3 x")
    assert code == 1 and "line 1: 'x' is no id" in err.splitlines()[-1]


@pytest.mark.slow
def test_a_folder_that_takes_no_file_costs_the_files_alone(run, runs, monkeypatch):
    flags = ["--output_dir=text", "--split=test", *FAST]
    code, written, err = run(evaluate.main, *flags)
    assert code == 0, err

    def write(path, data):
        raise OSError(f"{path} cannot be written (No space left on device): free space there")

    monkeypatch.setattr(durable, "write", write)
    code, out, err = run(evaluate.main, *flags)
    assert code == 1 and out.splitlines()[1:] == written.splitlines()[1:]
    assert "bleu" in out and "exact" in out and "not in a file" in out
    assert "evaluation_test.json cannot be written (No space left" in err.splitlines()[-1]


def test_the_loss_alone(run, runs):
    (runs / "text/translations_test.txt").unlink(missing_ok=True)
    flags = ["--output_dir=text", "--split=test", "--beam_size=0"]
    code, out, _ = run(evaluate.main, *flags)
    assert code == 0 and "bits_per_token" in out and "bleu" not in out
    assert not (runs / "text/translations_test.txt").exists()


def test_several_processes_do_not_translate(run, monkeypatch):
    monkeypatch.setattr(distributed, "joined", lambda: True)
    monkeypatch.setattr(distributed, "leave", lambda line, code: code)
    code, _, err = run(evaluate.main, "--output_dir=text", *FAST)
    assert code == 2 and "several processes do not translate: give --beam_size=0" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "main, flags, message",
    [
        (generate.main, ["--chat"], "--chat: this run's model translates and takes no such"),
        (generate.main, ["--temperature=0.5"], "--temperature=0.5: this run's model translates"),
        (generate.main, ["--beam_size=0"], "beam_size is 0: expected at least 1"),
        (evaluate.main, ["--beam_size=-1"], "beam_size is -1: expected at least 0"),
        (generate.main, ["--prompt_file=latin"], "line 2 is not UTF-8: byte 0xfc"),
        (evaluate.main, ["--beam_size=0", "--max_extra=9"], "--max_extra=9: with --beam_size=0"),
        (generate.main, ["--output_dir=lost", "--prompt=3"], "has no vocabulary.model, and check"),
        (evaluate.main, ["--data_dir=short", "--split=test"], "lines and"),
    ],
)
def test_a_mistake_is_one_line(run, runs, main, flags, message):
    (runs / "latin").write_bytes(b"gut\nf\xfcr\n")
    (runs / "short").mkdir(exist_ok=True)
    if not (runs / "lost").exists():
        shutil.copytree(runs / "text", runs / "lost")
        (runs / "lost/vocabulary.model").unlink()
    for language, lines in (("en", "a\nb\n"), ("de", "a\n")):
        (runs / f"short/test.{language}").write_text(lines)
    code, _, err = run(main, "--output_dir=text", *flags, stdin=b"cab\n")
    assert code in (1, 2), err
    assert message in err and err.splitlines()[-1].startswith("error: ")
