"""Trax's own loop of training trains and saves the model of docs/trax.md."""

import re

import numpy as np
import pytest

from tests.pages import ROOT, blocks


@pytest.mark.slow
def test_the_page_s_model_trains_in_trax_s_loop(tmp_path, monkeypatch, capsys):
    pytest.importorskip("trax")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/trax.md").read_text()
    code = next(block.text for block in blocks(text) if "training.Loop(" in block.text)
    names = {}
    exec(compile(code, "trax.md", "exec"), names)
    said = re.findall(r"Step +(\d+): (train|eval) +\w+ \| +([\d.]+)", capsys.readouterr().out)
    losses = {(kind, int(step)): float(loss) for step, kind, loss in said}
    assert losses["eval", 50] > losses["eval", 100] > 0
    assert losses["train", 100] < 1 < 4 < losses["train", 1]  # ln 256 is 5.5

    begun = re.search(r"^hashed = .*?(?=\ndef )", code, re.DOTALL | re.MULTILINE)[0]
    exec(begun, names)  # the page's model once more
    names["model"].init_from_file("runs/trax/model.pkl.gz", weights_only=True)
    trained = names["loop"].model
    tokens = np.frombuffer(b"a stitch in time saves ", np.uint8).astype(np.int32)[None]
    key = np.zeros(2, np.uint32)
    got, want = (m.pure_fn(tokens, m.weights, m.state, key)[0] for m in (names["model"], trained))
    np.testing.assert_array_equal(got, want)
    assert bytes(np.argmax(got[0, -2:], -1).astype(np.uint8)) == b" n"
