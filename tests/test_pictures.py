"""What scripts of docs draw and write: pictures, and tables that are read off the code."""

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from benchmarks.harness import attention_table as measured
from reformax.training import by_position
from tests.layers import plain
from tests.training import tiny

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs/pictures"


@pytest.fixture
def script(monkeypatch):
    """Loads a script of docs as a module; it imports what is beside it."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return _loaded


def _loaded(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pictures(monkeypatch, script):
    """The script that draws, and what it imports."""
    monkeypatch.syspath_prepend(str(PICTURES))
    before = set(sys.modules)
    yield script(PICTURES / "draw.py")
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(PICTURES)):
            del sys.modules[name]


@pytest.mark.slow
def test_every_picture_is_drawn_as_it_is_kept(pictures, tmp_path):
    pictures.main([f"--folder={tmp_path}"])
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in PICTURES.glob("*.svg")}
    for name in drawn:
        modes = [(tmp_path / name.replace("light", mode)).read_text() for mode in ("light", "dark")]
        assert "<svg" in modes[0] and ("light" not in name or modes[0] != modes[1])
        if matplotlib.__version__ == pictures.MATPLOTLIB:  # another may draw other paths
            kept = (PICTURES / name).read_bytes()
            assert (tmp_path / name).read_bytes() == kept, "run python docs/pictures/draw.py"


def test_every_picture_finds_its_figures(pictures):
    """The rows of pages that it reads are there; what it draws is compared by the slow test."""
    colors = importlib.import_module("style").MODES["light"]
    for name in pictures.PICTURES:
        importlib.import_module(name).draw(colors)


def test_a_picture_has_the_same_bytes_again(pictures, tmp_path):
    (tmp_path / "again").mkdir()
    for folder in (tmp_path, tmp_path / "again"):
        pictures.main(["--only", "training_step", f"--folder={folder}"])
    name = "training_step-light.svg"
    assert (tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_the_picture_of_lsh_attention_shows_what_it_computes(pictures):
    lsh = importlib.import_module("lsh")
    _, buckets = lsh.hashed()
    seen, read = lsh.sees(buckets)
    order = np.argsort(buckets, kind="stable")
    for i, j in np.ndindex(seen.shape):
        near = 0 <= i // lsh.CHUNK - j // lsh.CHUNK <= 1
        assert read[i, j] == near
        assert seen[i, j] == (
            near and buckets[order[i]] == buckets[order[j]] and order[j] <= order[i]
        )


def test_the_picture_of_an_indexer_shows_what_it_computes(pictures):
    known = importlib.import_module("indexer").found()
    assert set(known.candidates) == {i for i, b in enumerate(known.buckets) if b == known.bucket}
    scores = np.maximum(known.keys @ known.query, 0)
    least = min(scores[known.chosen])
    assert set(known.chosen) <= set(known.candidates) and len(known.chosen) == 3
    assert all(scores[i] <= least for i in set(known.candidates) - set(known.chosen))
    others = set(range(len(scores))) - set(known.candidates)
    assert set(known.missed) == {i for i in others if scores[i] > least}
    assert len(known.missed) == 1


def test_every_page_shows_a_picture_in_both_modes():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = [page.read_text() for page in pages]
    for path in PICTURES.glob("*.svg"):
        assert any(f"pictures/{path.name}" in text for text in texts), path.name


def test_the_table_of_attentions_is_that_of_the_code(script):
    attentions = script(ROOT / "docs/attentions.py")
    page = attentions.PAGE.read_text()
    assert attentions.written(page) == page, "run python docs/attentions.py"


def test_the_table_of_attentions_reads_the_code(script):
    attentions = script(ROOT / "docs/attentions.py")
    rows = {a.name: a for a in attentions.attentions()}
    for page in ("README.md", "docs/index.md"):
        assert f"{len(rows) - 1} other attentions" in (ROOT / page).read_text()
    assert attentions.is_causal(rows["moba"].op) == "only"
    assert attentions.is_causal(rows["linformer"].op) == attentions.NO
    assert attentions.context(rows["local"].op) == "borders"
    assert attentions.in_flax(rows["retention"].op) == attentions.YES
    assert attentions.in_flax(rows["routing"].op) == attentions.NO
    assert attentions.kernels(rows["long_short"].make) == "Pallas"
    assert attentions.kernels(rows["dense"].make) == "cuDNN, Pallas"


def test_names_of_lines_are_apart_and_near_their_lines(pictures):
    style = importlib.import_module("style")
    assert style.spread([0.2, 0.5], 0.1) == [0.2, 0.5]
    assert style.spread([0.5, 0.5, 0.5], 0.1) == pytest.approx([0.4, 0.5, 0.6])
    for heights in ([0.0, 0.01, 0.6], [0.9, 0.99, 1.0], [0.1] * 8):
        found = style.spread(heights, 0.1)
        assert min(np.diff(found)) > 0.0999 and found[0] >= 0.03 and found[-1] <= 0.98


def test_pictures_read_the_tables_of_pages(pictures, tmp_path, monkeypatch):
    tables = importlib.import_module("pages")
    page = "Text.\n\n| ms | N=1,024 | N=2,048 | MiB |\n| --- | ---: | ---: | ---: |\n"
    (tmp_path / "a.md").write_text(f"{page}| `one`, **two** | 1.5 / 2,500 | | 8 |\n\nText.\n")
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    (row,) = tables.table("a.md", "ms").values()
    assert row == {"ms": "one, two", "N=1,024": "1.5 / 2,500", "N=2,048": "", "MiB": "8"}
    assert tables.line(row, 1, "N=") == [(1024, 2500)]
    with pytest.raises(ValueError, match="substring not found"):
        tables.table("a.md", "seconds")


def test_a_picture_shows_what_the_page_says(pictures):
    """Of one whose figures are on the page, and one whose figures are in a file beside it."""
    colors = importlib.import_module("style").MODES["light"]
    recall = importlib.import_module("recall").draw(colors).axes[0].lines
    rows = importlib.import_module("pages").table(
        "results.md", "share of the true attention weight, by hashes"
    )
    assert [list(line.get_ydata()) for line in recall] == [
        [float(row[str(n)]) for n in (1, 2, 4, 8, 16)] for row in rows.values()
    ]
    scaling = importlib.import_module("scaling").draw(colors).axes[0].lines
    assert sorted(line.get_ydata()[-1] for line in scaling) == [3.496 / 4, 3.732 / 4, 3.821 / 4]


def test_the_page_has_the_gradient_s_times_that_the_picture_draws(pictures):
    pages, peers = (importlib.import_module(name) for name in ("pages", "peers"))
    rows, drawn = pages.table("zoo_measured.md", "gradient ms"), peers.read("linear_attention")
    assert pages.number(rows["gated_delta"]["N=1,048,576"]) == round(drawn["gated_delta"][-1][1], 1)
    text = (ROOT / "docs/zoo_measured.md").read_text()
    (moba,) = re.findall(r"^\| `moba`, 3 blocks of 512 \| .* \| (\d+) \|$", text, re.MULTILINE)
    assert int(moba) == round(peers.read("sparse_attention")["moba"][-1][1])


def test_the_table_of_times_is_that_of_the_file(script):
    tables = script(ROOT / "docs/attention_table.py")
    page = tables.PAGE.read_text()
    assert tables.written(page) == page, "run python docs/attention_table.py"
    shown = re.findall(r"^\| (\w+) \| [\d<O]", page, re.MULTILINE)
    assert len(shown) == len(set(shown)), "an attention has figures of two measurements"
    assert set(shown) == {key[0] for key in tables.read()} - set(tables.UNSHOWN)


def test_all_tables_of_times_have_every_figure_of_the_file(script):
    tables = script(ROOT / "docs/attention_table.py")
    printed, rows = tables.tables(), tables.read()
    numbers = [int(n) for n in re.findall(r"^### (\d+)\.", printed, re.MULTILINE)]
    assert numbers == [*range(12, 24)], "the file has no times with dropout and a mask"
    both = printed.partition("### 20.")[2].partition("### 21.")[0]
    lengths = {int(key[1]) for key in rows}
    for name in {key[0] for key in rows}:
        found = [rows.get((name, str(f(lengths)), *tables.PLAIN)) for f in (min, max)]
        cells = [tables.cell(row, "combined_ms") for row in found]
        line = next(x for x in both.splitlines() if x.startswith(f"| {name} |"))
        assert [line.split(" | ")[1], line.removesuffix(" |").split(" | ")[-1]] == cells


def test_all_tables_are_those_of_a_file_of_the_benchmark_too(script, tmp_path):
    shape = measured.SHAPES["tiny"]
    every = [case for group in measured.groups(shape, ["flash", "linear"]) for case in group]
    known = {case: measured.Figures(1.0, 2.0, 3.0, case.length / 64) for case in every}
    (slow,) = (x for x in every if x[:4] == ("linear", 128, 0.0, False))
    known[slow] = measured.Figures(error=measured.LEFT_OUT)
    known[slow._replace(machine="another")] = measured.Figures(9.0, 9.0, 9.0, 9.0)
    measured.write(tmp_path, known, slow.machine)
    printed = script(ROOT / "docs/attention_table.py").tables(tmp_path / "table.csv")
    assert "### 9. Forward pass, dropout, mask, ms\n\n| attention | 64 | 128 |\n" in printed
    memory = printed.partition("### 21.")[2]
    assert "| flash | 1.00 | 2.00 |\n| linear | 1.00 | slow |\n" in memory


def test_a_backward_pass_below_nothing_is_no_figure(script):
    tables = script(ROOT / "docs/attention_table.py")
    for key, row in tables.read().items():
        if row["backward_ms"].startswith("-"):
            assert tables.cell(row, "backward_ms") == tables.NONE, key
    row = {"backward_ms": "0.05", "combined_ms": "0.5", "host_ms": "0.04", "error": ""}
    assert [tables.cell(row, x) for x in ("backward_ms", "combined_ms")] == ["< 0.05", "0.50"]
    assert tables.cell(row | {"backward_ms": "-0.05"}, "backward_ms") == tables.NONE
    assert tables.cell(row | {"backward_ms": ""}, "backward_ms") == "OOM"
    assert tables.cell({"error": "out of memory"}, "backward_ms") == "OOM"


def test_the_page_is_made_without_jax(tmp_path):
    code = f"import runpy, sys; runpy.run_path({str(ROOT / 'docs/attention_table.py')!r}); "
    code += "assert 'jax' not in sys.modules"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "docs")}
    command = [sys.executable, "-P", "-c", code]
    subprocess.run(command, check=True, cwd=tmp_path, env=environment)


def test_a_length_is_compared_with_its_own_time_of_flash_attention(script, tmp_path):
    """The lengths of the benchmark are some of those that the paper has."""
    shape = measured.SHAPES["gpu"]
    every = [x for group in measured.groups(shape, ["flash", "dense"]) for x in group]
    known = {case: measured.Figures(1.0, 1.0, case.length / 256, 1.0) for case in every}
    measured.write(tmp_path, known, every[0].machine)
    printed = script(ROOT / "docs/attention_table.py").tables(tmp_path / "table.csv")
    of_a100 = printed.partition("### 22.")[2]
    assert "| attention | 256 | 1,024 | 4,096 | 16,384 | 65,536 |" in of_a100
    assert "| flash | 0.31x | 0.57x | 1.88x | 7.35x | 29.27x |" in of_a100
    assert printed.count("| attention | 256 | 1,024 | 4,096 | 16,384 | 65,536 |") == 15


def test_figures_of_several_folders_are_one_file(script, tmp_path, monkeypatch):
    """In the order of the benchmark, whichever came first; a case that was not reached is none."""
    tables = script(ROOT / "docs/attention_table.py")
    monkeypatch.setattr(tables, "CSV", tmp_path / "attention_table.csv")
    shape = measured.Shape(16, (65536, 128), 8, 64, "bfloat16")
    every = [x for group in measured.groups(shape, ["linear", "flash", "dense"]) for x in group]
    files = {n: measured.File(tmp_path / str(n) / "table.jsonl") for n in shape.lengths}
    for case in every:
        ms = (
            case.length
            / 64
            * (1.5 if case.dropout else 1)
            * (2 if case.attention == "flash" else 1)
        )
        if case.attention != "linear" or not case.dropout:
            figures = measured.Figures(ms / 4, None if case.masked else ms, ms, 7.0, host_ms=2.0)
            files[case.length].write(case, figures)
    tables.join([tmp_path / f"{n}/table.jsonl" for n in shape.lengths])
    rows = tables.read(tables.CSV)
    assert list(dict.fromkeys(key[0] for key in rows)) == ["flash", "dense", "linear"]
    assert list(dict.fromkeys(key[1] for key in rows)) == ["128", "65536"] and len(rows) == 20
    monkeypatch.setattr(tables, "read", lambda *_: rows)
    shown = tables.summary()
    assert "| flash | 512 | 2,048 | 1.50x |" in shown
    assert "| linear | 256 | 1,024 | – |" in shown
    printed = tables.tables()
    both = printed.partition("### 20.")[2]
    assert "| flash | 4.00 | 2,048 |" in both and "| dense | < 2.00 | 1,024 |" in both
    of_a100, of_dense = both.partition("### 22.")[2].split("### 23.")
    assert "| flash | 0.08x | 3.66x |" in of_a100 and "| flash | 0.50x | 0.50x |" in of_dense
    file = tables.CSV.read_text()
    for other in ({"machine": "another"}, {"n_heads": 1}, {"attention": "gone"}):
        path = tmp_path / "_".join(other) / "table.jsonl"
        for case in (every[0]._replace(**other), every[1]):
            measured.File(path).write(case, measured.Figures(1.0, 1.0, 1.0, 1.0))
        wrong = "'gone'" if "attention" in other else "--join has figures of 2 machines or sizes"
        with pytest.raises(ValueError, match=wrong):
            tables.join([path])
        assert tables.CSV.read_text() == file


def test_every_attention_has_a_panel(pictures):
    drawn = importlib.import_module("attention_table")
    names = [name for panel in drawn.PANELS.values() for name in panel]
    assert sorted([*names, drawn.REFERENCE]) == sorted(measured.attentions())
    assert set(drawn.read()) <= {*names, drawn.REFERENCE}
    n_hues = len(importlib.import_module("style").MODES["light"].hues) + 1
    assert max(map(len, drawn.PANELS.values())) <= n_hues  # others would not be drawn


@pytest.mark.parametrize("name", ["linear_attention", "sparse_attention"])
def test_lines_beside_peers_are_those_of_the_file(pictures, name):
    drawn, peers = importlib.import_module(name), importlib.import_module("peers")
    names = {line for panel in drawn.PANELS.values() for line in panel}
    assert names <= peers.read(name).keys()
    assert peers.read(name).keys() - names <= {"flash", "flash, 1 head of keys"}


@pytest.fixture
def scored(tmp_path):
    """Folders of three small models, of which one was scored in shorter windows."""
    task = tiny.counting(n_valid=300)
    for name, seed, length in (("one", 1, 256), ("two", 2, 256), ("short", 2, 128)):
        model = tiny.TinyLM(mode="eval")
        params = plain.init(model, (1, 1), seed=seed)
        bands = by_position.by_position(model, params, task, batch_size=1, length=length)
        found = by_position.as_json(bands, "bits_per_dim")
        (tmp_path / name).mkdir()
        record = [found | {"split": "valid"}, {"split": "valid"}, {"split": "test"}]
        text = "".join(f"{json.dumps(line)}\n" for line in record)
        (tmp_path / name / "evaluations.jsonl").write_text(text)
    return tmp_path


def test_bits_by_position_are_those_of_the_evaluations(pictures, scored):
    script = importlib.import_module("by_position")
    runs = [scored / "one", scored / "two"]
    script.main([*map(str, runs), f"--out={scored / 'drawn'}"])
    for mode in ("light", "dark"):
        assert "<svg" in (scored / f"drawn-{mode}.svg").read_text()
    colors = importlib.import_module("style").MODES["light"]
    bits, less = script.draw(colors, script.read_all(runs, "valid")).axes
    found = [json.loads((run / "evaluations.jsonl").open().readline()) for run in runs]
    values = [[band["bits_per_dim"] for band in each["by_position"]] for each in found]
    assert [list(line.get_ydata()) for line in bits.lines] == values
    assert [list(line.get_xdata()) for line in bits.lines] == [[64, 128, 256]] * 2
    np.testing.assert_array_equal(less.lines[0].get_ydata(), 0)
    np.testing.assert_allclose(less.lines[1].get_ydata(), np.subtract(*values[::-1]))
    for axes in (bits, less):
        assert {text.get_text() for text in axes.texts} == {"one", "two"}
        low, high = axes.get_ylim()
        assert all(low < y < high for line in axes.lines for y in line.get_ydata())


def test_bits_that_do_not_compare_are_refused(pictures, scored, capsys):
    script = importlib.import_module("by_position")
    for names, message in (
        (["one"], "expected 2 to 6 folders of different names"),
        (["one", "one"], "expected 2 to 6 folders of different names"),
        (["one", "short"], "one has bits_per_dim of windows of 256 and short bits_per_dim of win"),
        (["one", "none"], "evaluate --output_dir=.*none --split=valid --by_position writes them"),
    ):
        with pytest.raises(SystemExit):
            script.main([*(str(scored / name) for name in names), f"--out={scored / 'drawn'}"])
        assert re.search(message, capsys.readouterr().err.replace("\n", " "))
    assert not (scored / "drawn-light.svg").exists()


def asked(folder, *evaluations):
    """A run's folder with evaluations, each `{task: {length: accuracy by depth or in all}}`."""
    folder.mkdir()
    with (folder / "evaluations.jsonl").open("w") as file:
        print(json.dumps({"split": "valid", "bits_per_dim": 1.0}), file=file)
        for tasks in evaluations:
            found = {}
            for task, by_length in tasks.items():
                lines = []
                for length, x in by_length.items():
                    by_depth = {"accuracy_by_depth": x} if isinstance(x, list) else {}
                    lines.append({"length": length, "accuracy": float(np.mean(x)), **by_depth})
                found[task] = {"by_length": lines}
            print(json.dumps({"tasks": found}), file=file)
    return folder


def test_answers_are_those_of_the_evaluations(pictures, tmp_path):
    """A length that was scored twice counts as the last time; lengths are in order."""
    first = {"needle": {64: [0.1, 0.2], 256: [0.3, 0.4]}, "variables": {64: 0.5}}
    one = asked(tmp_path / "one", first, {"needle": {128: [0.9, 0.8], 64: [0.6, 0.7]}})
    two = asked(tmp_path / "two", {"needle": {64: [0.0, 1.0]}, "variables": {64: 0.25}})
    script = importlib.import_module("answers")
    script.main([str(one), str(two), f"--out={tmp_path / 'drawn'}"])
    for mode in ("light", "dark"):
        assert "<svg" in (tmp_path / f"drawn-{mode}.svg").read_text()
    colors = importlib.import_module("style").MODES["light"]
    panels = script.draw(colors, script.read_all([one, two], ())).axes
    values = [np.asarray(axes.images[0].get_array()).tolist() for axes in panels]
    assert values == [[[0.6, 0.9, 0.3], [0.7, 0.8, 0.4]], [[0.5]], [[0.0], [1.0]], [[0.25]]]
    assert [x.get_text() for x in panels[0].get_xticklabels()] == ["64", "128", "256"]
    assert [axes.get_title() for axes in panels] == ["needle", "variables", "", ""]
    assert [axes.get_ylabel() for axes in panels] == ["one", "", "two", ""]
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="none/evaluations.jsonl has no answers: reformax evaluat"):
        script.read(tmp_path / "none")
    with pytest.raises(ValueError, match="two was not asked copy"):
        script.read_all([two], ["copy"])
    asked(tmp_path / "three", {"needle": {64: [0.1, 0.2]}}, {"needle": {128: [0.1, 0.2, 0.3]}})
    with pytest.raises(ValueError, match="three answered needle in 2 and 3 depths: evaluate"):
        script.read(tmp_path / "three")
