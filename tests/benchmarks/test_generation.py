"""Speed of generation."""

import pytest

from benchmarks import generation
from tests.helpers import table_cells


@pytest.mark.slow
def test_generation_against_the_forward(monkeypatch, capsys):
    """Everything runs; the times are made up: 1 ms for the prompt, 3 for all, 9 for the forward."""

    def in_turn(functions, repeats):
        assert repeats == 1
        for function in functions.values():
            function()
        return {name: {"forward": 0.009, 1: 0.001, 9: 0.003}[name] for name in functions}

    monkeypatch.delitem(generation.LSH, "strictly causal")
    monkeypatch.setattr(generation, "in_turn", in_turn)
    generation.main(["--tiny", "--repeats=1"])
    row = table_cells(capsys.readouterr().out, "reformax, ordinary")
    assert row[1:] == ["1", "0.250", "4,000", "0.00", "9.0", "36"]


def test_a_missing_peer_is_a_row(monkeypatch, capsys):
    def missing(*_):
        raise ImportError("no module | named torch")

    monkeypatch.setattr(generation, "theirs", missing)
    monkeypatch.setattr(generation, "ours", lambda *_: (0.002, 0.1))
    monkeypatch.setattr(generation, "reformer", lambda *_, **__: (None, None))
    shape = generation.SHAPES["tiny"]._replace(axial=True)
    monkeypatch.setitem(generation.SHAPES, "tiny", shape)
    generation.main(["--tiny", "--repeats=1"])
    printed = capsys.readouterr().out
    assert table_cells(printed, "reformax, ordinary")[1:5] == ["1", "2.000", "500", "0.10"]
    name = "Hugging Face, float32, generate"
    assert table_cells(printed, name)[2] == "ImportError: no module / named torch"
