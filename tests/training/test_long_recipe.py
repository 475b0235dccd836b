"""The recipe of docs/long_sequences.md, from data to a scored model on four simulated devices.

Its commands are the page's, with the model and the lengths cut. tests/test_docs.py runs them too,
for two steps, and looks at no result.
"""

import json
import re

import pytest

from tests import pages
from tests.pages import ROOT

PAGE = (ROOT / "docs/long_sequences.md").read_text()
CUT = {
    **dict(d_model=16, d_ff=32, d_head=8, n_heads=4, n_layers=4, scan_layers=True),
    **dict(dtype="float32", batch_size=4, length=256, steps=60, warmup_steps=5, learning_rate=1e-2),
    "stages.Stage.length": 64,
    "stages.Stage.batch_size": 8,
    "local.local.chunk_len": 16,
    "local.local.window": 32,
    "lsh.lsh.chunk_len": 16,
    "lsh.lsh.n_hashes": 2,
    "loop.train.eval_length": 256,
    "loop.train.eval_stride": 128,
    "loop.train.log_every": 1,
}
FLAGS = " ".join(f'--config="{name}={value!r}"' for name, value in CUT.items())


def command(start: str) -> str:
    """The one command of the page that matches."""
    (found,) = {c for c in pages.commands(PAGE) if re.fullmatch(start, c)}
    return found


@pytest.mark.slow
def test_the_recipe_from_data_to_a_scored_model(tmp_path):
    (tmp_path / "my_texts").mkdir()
    page = (ROOT / "docs/reference/command_line.md").read_text()
    for i in range(10):
        (tmp_path / f"my_texts/{i}.txt").write_text(page)
    for name, text in pages.gin_files(PAGE).items():
        (tmp_path / name).write_text(text)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/reformax").write_text('#!/bin/sh\nexec python -m reformax "$@"\n')
    (tmp_path / "bin/reformax").chmod(0o755)
    env = pages.environment(
        tmp_path / "compiled", tmp_path / "bin", PYTHONPATH=str(ROOT), JAX_NUM_CPU_DEVICES="4"
    )

    def run(call: str, flags: str = "") -> str:
        return pages.run(f"{call} {flags}", tmp_path, env)

    def lines(run: str, tag: str) -> list[dict]:
        text = (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, text) if line["tag"] == tag]

    run(command(r"reformax train .*--output_dir=runs/long"), FLAGS)
    (last,) = (line for line in lines("runs/long", "eval") if line["whole"])
    train = lines("runs/long", "train")
    assert [line["step"] for line in train] == [*range(1, 61)]
    assert train[0]["bits_per_dim"] > 7 and last["bits_per_dim"] < 5

    one = f"{FLAGS} --output_dir=runs/one --config='loop.train.mesh={{}}'"
    env["JAX_NUM_CPU_DEVICES"] = "1"
    run(command(r"reformax train --config_file=long.gin --data_dir=my_texts"), one)
    (alone,) = (line for line in lines("runs/one", "eval") if line["whole"])
    assert alone["bits_per_dim"] == pytest.approx(last["bits_per_dim"], abs=0.02)
    env["JAX_NUM_CPU_DEVICES"] = "4"

    run(command(r"reformax evaluate .* --by_position"))
    scored = json.loads((tmp_path / "runs/long/evaluation_test.json").read_text())
    bands = scored["by_position"]
    assert [band["end"] for band in bands] == [64, 128, 256]
    assert sum(band["n_targets"] for band in bands) == scored["n_targets"]
    run(command(r"reformax evaluate .* --stride=2048"), "--length=64 --stride=32")
    short = json.loads((tmp_path / "runs/long/evaluation_test.json").read_text())
    assert short["n_targets"] == scored["n_targets"] and short["length"] == 64

    said = run(command(r"reformax generate .*"), "--max_new_tokens=20")
    assert "The " in said and len(said.strip()) > 10


@pytest.mark.slow
def test_a_million_tokens_of_joined_files_train_on_four_devices(tmp_path):
    """The config for 1,048,576 tokens, at 4,096: a window is of the files of one folder."""
    text = (ROOT / "docs/training.md").read_text()
    for i in range(9):
        path = tmp_path / f"texts/{i % 3}/{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    sizes = CUT | {"length": 4096, "batch_size": 1, "steps": 5, "stages.Stage.length": 512}
    sizes |= {"d_ff": 16, "loop.train.eval_batch_size": 4}
    flags = " ".join(f'--config="{name}={value!r}"' for name, value in sizes.items())
    env = pages.environment(
        tmp_path / "compiled", tmp_path, PYTHONPATH=str(ROOT), JAX_NUM_CPU_DEVICES="4"
    )
    train = "python -m reformax train --config_file=transformer_text_1m_37m.gin --data_dir=texts"
    said = pages.run(f"{train} --output_dir=run {flags}", tmp_path, env)
    assert "4 cpu devices" in said
    record = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, record) if line["tag"] == "train"]
    assert len(steps) == 5 and all(0 < line["bits_per_dim"] < 9 for line in steps)
    evaluate = "python -m reformax evaluate --output_dir=run --length=4096 --batch_size=1"
    pages.run(f"{evaluate} --by_position", tmp_path, env)
    (found,) = map(json.loads, (tmp_path / "run/evaluations.jsonl").read_text().splitlines())
    assert found["by_position"][-1]["end"] == 4096
