"""The table of attentions by length."""

import fcntl
import functools
import importlib
import json
import pkgutil
import threading
import time
import types

import jax
import numpy as np
import pytest

import reformax.ops
from benchmarks import attention
from benchmarks.harness import attention_table, calls


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

    def lowered(op, case):
        if case.attention == "flash" and case.dropout and case.masked:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying")
        return attention_table.Programs(*[Compiled()] * 4)

    def measure(op, case, of):
        if case.length == 128 and case.masked:
            raise MemoryError("9 MiB")
        measured.append(case)
        slow = case.attention == "linear" and not case.masked
        return attention_table.Figures(1.0, 2.0, 3000.0 if slow else 3.0, 1.5)

    monkeypatch.setattr(attention_table, "lowered", lowered)
    monkeypatch.setattr(attention_table, "measure", measure)

    def fill():
        file = attention_table.File(path)
        groups = list(attention_table.fill(file, shape, names))
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
    last = max(i for i, line in enumerate(written) if "[1.0, 2.0, 3.0" in line)
    path.write_text("".join(written[:last]) + written[last][:-9])
    measured.clear()
    again, _ = fill()
    assert again.known == file.known
    assert [list(x) for x in measured] == [json.loads(written[last])[0]]
    path.write_text(json.dumps([list(every[0]), [1.0, -0.1, 0.9, 1.5, ""]]) + "\n")
    assert not attention_table.File(path).known  # of an older table
    begun = [line for line in written if line.endswith("null]\n")]
    path.write_text(begun[0] * 2)
    assert fill()[0].known[every[0]].error == "the process ended 2 times"

    attention_table.write(tmp_path, again.known, every[0].machine)
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 17


class Compiled:
    """A program."""

    def __init__(self, seconds=0.0, size=8):
        self.seconds, self.size = seconds, size

    def compile(self):
        time.sleep(self.seconds)
        return self

    def __call__(self, *args, **named):
        return np.zeros(1), named

    def memory_analysis(self):
        sizes = dict(argument_size=self.size, output_size=0, temp_size=0)
        return types.SimpleNamespace(**{f"{x}_in_bytes": y for x, y in sizes.items()})


def test_passes_that_do_not_fit_apart_are_not_run_apart(monkeypatch):
    """Running out of memory, a program leaves arrays there for as long as its process lives."""
    (case, *_), *_ = attention_table.groups(attention_table.SHAPES["tiny"], ["flash"])
    monkeypatch.setattr(attention_table, "inputs_of", lambda op, case: dict(d_out=0))
    monkeypatch.setattr(attention_table.memory, "available", lambda: 100)
    for of_inputs, kept, fits in ((40, 60, True), (41, 60, False), (101, 0, False)):
        of = Compiled(), Compiled(size=of_inputs), Compiled(size=kept), Compiled()
        found = attention_table.measure(None, case, attention_table.Programs(*of))
        assert (found.backward_ms is not None) == fits and found.combined_ms is not None


def test_a_case_that_leaves_arrays_in_memory_ends_the_command(tmp_path, monkeypatch):
    shape = attention_table.SHAPES["tiny"]._replace(lengths=(64,))
    device = types.SimpleNamespace(memory_stats=lambda: dict(bytes_in_use=2**30))
    out = RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying")
    monkeypatch.setattr(attention_table, "lowered", lambda op, case: [Compiled()] * 4)
    monkeypatch.setattr(attention_table, "measure", lambda *_: exec("raise out", dict(out=out)))
    monkeypatch.setattr(attention_table.jax, "local_devices", lambda: [device])
    file = attention_table.File(tmp_path / "table.jsonl")
    with pytest.raises(RuntimeError, match="flash of 64 tokens has left 1.0 GiB .* same command"):
        list(attention_table.fill(file, shape, ["flash", "linear"], ["plain"]))
    assert [case.attention for case in file.known] == ["flash"]


@pytest.mark.parametrize("ends", [True, False])
def test_what_a_late_program_holds_is_no_fault_of_a_case(tmp_path, monkeypatch, ends):
    """It is waited for, and not longer than for any program."""
    shape = attention_table.SHAPES["tiny"]._replace(lengths=(64,))
    over, waited = threading.Event(), []

    class Late(Compiled):
        def compile(self):
            over.wait(60)
            return self

    def sleep(seconds):
        waited.append(seconds)
        if ends and len(waited) > 2:
            over.set()

    def held():
        return dict(bytes_in_use=0 if over.is_set() else 2**30)

    programs = {"flash": Late(), "linear": Compiled()}
    monkeypatch.setattr(attention_table, "lowered", lambda op, _: [programs[op.name]] * 4)
    monkeypatch.setattr(attention_table, "inputs_of", lambda op, case: dict(d_out=0))
    device = types.SimpleNamespace(memory_stats=held, platform="cpu")
    monkeypatch.setattr(attention_table.jax, "local_devices", lambda: [device])
    clock = types.SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    monkeypatch.setattr(attention_table, "time", clock)
    file = attention_table.File(tmp_path / "table.jsonl")
    fill = attention_table.fill(file, shape, ["flash", "linear"], ["plain"], limit=0.3)
    if ends:
        list(fill)
        assert len(waited) > 2 and not file.known[next(reversed(file.known))].error
    else:
        with pytest.raises(RuntimeError, match="still compiling .* 1.0 GiB .* same command again"):
            list(fill)
    over.set()


def test_commands_of_one_folder_write_its_tables_in_turn(tmp_path, monkeypatch):
    """Two at a time fail, or leave out lines of each other."""
    written, shape = [], attention_table.SHAPES["tiny"]
    (group, *_) = attention_table.groups(shape, ["flash"])

    def fill(file, *_):
        for case in group:
            file.write(case, attention_table.Figures(1.0, 2.0, 3.0, 4.0))
        yield group

    def write(folder, known, machine):
        with (folder / "lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        written.append(known)

    monkeypatch.setattr(attention_table, "fill", fill)
    monkeypatch.setattr(attention_table, "write", write)
    attention.main([f"--table={tmp_path}", "--tiny"])
    assert [list(known) for known in written] == [group]


def test_what_is_asked_for_twice_is_measured_once():
    shape = attention_table.SHAPES["tiny"]._replace(lengths=(64, 128, 64))
    (group,) = attention_table.groups(shape, ["flash", "linear", "flash"], ["mask"])
    found = [(case.length, case.attention) for case in group]
    assert found == [(64, "flash"), (64, "linear"), (128, "flash"), (128, "linear")]


def test_what_does_not_compile_in_time_keeps_nothing_else_waiting(tmp_path, monkeypatch):
    shape = attention_table.SHAPES["tiny"]._replace(lengths=(128, 64))
    seconds = {"flash": 9.0, "linear": 0.0}
    monkeypatch.setattr(attention_table, "COMPILERS", 16)
    monkeypatch.setattr(
        attention_table, "lowered", lambda op, _: [Compiled(seconds[op.name]) for _ in range(4)]
    )
    monkeypatch.setattr(attention_table, "inputs_of", lambda op, case: dict(d_out=0))
    file = attention_table.File(tmp_path / "table.jsonl")
    (group,) = attention_table.fill(file, shape, ["flash", "linear"], ["mask"], limit=0.3)
    assert [x.length for x in group] == [128, 128, 64, 64]  # compiled side by side
    assert {(x.attention, x.masked, y.error) for x, y in file.known.items()} == {
        ("flash", True, "TimeoutError: not compiled in 0.3 s"),
        ("linear", True, ""),
    }

    # A longer limit tries it again, and the same does not.
    seconds["flash"] = 0.0
    known, asked = dict(file.known), []
    monkeypatch.setattr(
        attention_table, "lowered", lambda op, case: asked.append(case) or [Compiled()] * 4
    )
    for limit in (0.3, 0.2):
        list(attention_table.fill(file, shape, ["flash", "linear"], ["mask"], limit=limit))
        assert not asked and file.known == known
    file = attention_table.File(tmp_path / "table.jsonl")
    list(attention_table.fill(file, shape, ["flash", "linear"], ["mask"], limit=9))
    assert {case.attention for case in asked} == {"flash"} and len(asked) == 2
    assert not any(figures.error for figures in file.known.values())


def test_a_late_case_that_ends_its_process_when_tried_again_is_given_up(tmp_path):
    (case, *_), *_ = attention_table.groups(attention_table.SHAPES["tiny"], ["flash"])
    late = attention_table.Figures(error="TimeoutError: not compiled in 150 s")
    file = attention_table.File(tmp_path / "table.jsonl")
    ops = attention_table.attentions()
    for figures in (None, late, None, None):
        assert attention_table.leave_out(file, ops, [case], limit=300) == [case]
        file.write(case, figures)
    assert attention_table.leave_out(file, ops, [case], limit=300) == []
    assert file.known[case].error == "the process ended 2 times"


def test_a_gpu_s_longest_rows_are_measured_first():
    """What an interrupted run has is then what the page shows; 4,096 is in another page."""
    shape = attention_table.SHAPES["gpu"]
    assert shape.lengths == (65536, 16384, 4096, 1024, 256)
    first, second = attention_table.groups(shape, ["flash"], ["plain"])
    assert [case.length for case in first] == [65536]
    assert [case.length for case in second] == [16384, 4096, 1024, 256]


def test_a_slow_row_leaves_out_longer_ones_and_no_shorter_one(tmp_path):
    shape = attention_table.SHAPES["tiny"]._replace(lengths=(256, 128, 64))
    (cases,) = attention_table.groups(shape, ["flash"], ["plain"])
    file, ops = attention_table.File(tmp_path / "table.jsonl"), attention_table.attentions()
    slow = attention_table.Figures(1.0, 1.0, 9000.0, 1.0)
    file.write(cases[0], slow)
    assert attention_table.leave_out(file, ops, cases, limit=9) == cases[1:]
    file.known.clear()
    file.write(cases[1], slow)
    assert attention_table.leave_out(file, ops, cases, limit=9) == cases[2:]
    assert file.known[cases[0]].error == attention_table.LEFT_OUT


def test_both_passes_have_figures_where_memory_is_too_small_for_what_one_keeps(monkeypatch):
    monkeypatch.setattr(attention_table, "inputs_of", lambda op, case: dict(d_out=0))
    shape = attention_table.SHAPES["tiny"]
    (case, *_), *_ = attention_table.groups(shape, ["flash"])

    class Fails(Compiled):
        def __call__(self, **named):
            raise RuntimeError(f"{text}: while allocating")

    of = attention_table.Programs(Compiled(size=2**20), Fails(), Compiled(), Compiled())
    text = "RESOURCE_EXHAUSTED"
    figures = attention_table.measure(None, case, of)
    assert figures.combined_ms > 0 and figures.memory_mib == 1.0 and figures.backward_ms is None
    assert attention_table.cell(figures, "backward_ms") == "out of memory"
    text = "INTERNAL"
    with pytest.raises(RuntimeError, match="INTERNAL"):
        attention_table.measure(None, case, of)
    with pytest.raises(MemoryError):
        attention_table.measure(None, case, of._replace(combined=Compiled(size=2**63)))


@pytest.mark.parametrize(
    "seconds, n_calls", [(0.001, 1 + 1 + 2 + 20), (0.1, 1 + 1 + 2 + 5), (0.4, 2), (3.0, 1)]
)
def test_of_slow_programs_fewer_calls_are_timed(monkeypatch, seconds, n_calls):
    clock, made = [0.0], []

    def call():
        made.append(0)
        clock[0] += seconds
        return 0

    monkeypatch.setattr(calls.time, "perf_counter", lambda: clock[0])
    assert attention_table.queued_ms(call) == pytest.approx(seconds * 1e3)
    assert len(made) == n_calls


def test_a_device_that_runs_nothing_any_more_ends_the_table(tmp_path, monkeypatch):
    """Otherwise all that follows would be recorded as failed."""
    monkeypatch.setattr(attention_table, "compiled", lambda ops, cases, _: dict.fromkeys(cases, 0))

    def fails(*_):
        raise RuntimeError("ILLEGAL_ADDRESS")

    monkeypatch.setattr(attention_table, "measure", fails)
    monkeypatch.setattr(attention_table, "first", fails)
    file = attention_table.File(tmp_path / "table.jsonl")
    with pytest.raises(RuntimeError, match="ILLEGAL_ADDRESS"):
        list(attention_table.fill(file, attention_table.SHAPES["tiny"], ["flash"]))
    assert len(file.known) == 1


@pytest.mark.parametrize("name", ["flash", "linformer"])
def test_the_table_times_each_pass_of_its_own(name):
    shape = attention_table.SHAPES["tiny"]._replace(lengths=(64,))
    ((case,), *_) = attention_table.groups(shape, [name])
    op = attention_table.attentions()[name]
    given = attention_table.inputs_of(op, case)
    made = attention_table.compiled({name: op}, [case], 99)[case]
    out, gradients = made.combined(**given)
    kept_out, kept = made.keeping(**given)
    found = kept_out, made.backward(kept)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-2), found, (out, gradients))
    figures = attention_table.measure(op, case, made)
    assert min(figures.forward_ms, figures.backward_ms, figures.host_ms) > 0
    shown = figures._replace(forward_ms=0.02, backward_ms=0.5, host_ms=0.02)
    cells = [attention_table.cell(shown, f"{x}_ms") for x in ("forward", "backward")]
    assert cells == ["< 0.02", "0.50"]


@pytest.mark.slow
def test_the_table_measures_an_attention_with_weights_and_gates(tmp_path, capsys):
    flags = [f"--table={tmp_path}", "--tiny", "--lengths", "64", "--only"]
    attention.main([*flags, "linformer", "gated_linear", "routing"])
    text = (tmp_path / "table.csv").read_text()
    assert "Error" not in text and "no weights to drop" in text
    assert "| linformer | " in capsys.readouterr().out
