"""The table of attentions by length."""

import functools
import importlib
import json
import pkgutil

import jax
import numpy as np
import pytest

import reformax.ops
from benchmarks import attention
from benchmarks.harness import attention_table


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
