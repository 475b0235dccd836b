"""Which configs can be converted, and a run of one of them on its way to each format."""

import re
from pathlib import Path

import pytest

import train
from reformax.cli import config, configs
from reformax.convert import __main__ as command
from reformax.convert import hugging_face, trax_models
from reformax.convert.spec import Spec

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = configs.runs()
TARGETS = {"hugging_face": hugging_face.config_of, "trax": trax_models.table}


def obstacles(path: Path, *overrides: str) -> dict[str, str | None]:
    """The error of each target's conversion of a config's model; None where it has none."""
    config.parse([str(path)], overrides)
    found = {}
    for target, convert in TARGETS.items():
        try:
            convert(Spec.of_config())
            found[target] = None
        except ValueError as error:
            found[target] = str(error)
    return found


def table() -> dict[str, tuple[str, str]]:
    """The cells of docs/conversion.md by config: of those that a format has."""
    text = (ROOT / "docs/conversion.md").read_text().partition("| config |")[2]
    rows = [row.split("|")[1:-1] for row in text.partition("\n\n")[0].splitlines()[2:]]
    return {
        name: (there.strip(), trax.strip())
        for names, there, trax in rows
        for name in re.findall(r"`(\w+)`", names)
    }


# What stands in the way of some that are refused.
REASONS = {
    "quickstart": ("pos_type is 'rotary_local'", "pos_type is 'rotary_local'"),
    "transformer_enwik8": ("norm is 'layer', expected 'rms'", "pos_type is 'rotary'"),
    "reformer_enwik8": ("n_buckets is 'auto'", "lsh's count_once is True"),
    "gpt2": (None, "tie_embeddings is True"),
    "gated_delta": ("pos_type is 'rotary_local'", "pos_type is 'rotary_local'"),
    "images": ("pos_axial_shape is (64, 64, 3)", "lsh's count_once is True"),
    "classify": ("model is TransformerEncoder", "model is TransformerEncoder"),
    "bert": ("ff_activation is 'gelu_tanh'", "the model is TransformerMaskedLM"),
}


def test_the_table_of_the_docs_has_configs():
    assert table().keys() < {path.stem for path in CONFIGS}
    assert all({"yes"} <= set(cells) <= {"yes", "no"} for cells in table().values())


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[] if path.stem in REASONS else pytest.mark.slow)
        for path in CONFIGS
    ],
)
def test_a_config_can_be_converted_as_the_table_says(path):
    cells = table().get(path.stem, ("no", "no"))
    reasons = REASONS.get(path.stem, ("", ""))
    for (target, error), cell, reason in zip(obstacles(path).items(), cells, reasons, strict=True):
        assert (error is None) == (cell == "yes"), (target, error, cell)
        assert error is None or (reason in error and "\n" not in error), (target, error)


def test_the_settings_of_the_docs_make_a_transformer_one_of_trax():
    text = (ROOT / "docs/conversion.md").read_text()
    ((lines),) = re.findall(r"```gin\n(.*?)```", text, re.DOTALL)
    overrides = [line for line in lines.splitlines() if line.startswith("lm.")]
    path = configs.find("transformer_enwik8_800k")
    assert "pos_type is 'rotary'" in obstacles(path)["trax"]
    assert obstacles(path, *overrides)["trax"] is None


SIZES = dict(d_model=16, d_ff=16, d_head=8, n_heads=2, n_layers=4, length=32, batch_size=2, steps=2)
SMALL = {
    "stdlib.stdlib.max_bytes": 20_000,
    "local.local.chunk_len": 8,
    "lsh.lsh.chunk_len": 8,
    "lsh.lsh.n_buckets": 8,
    "warmup_steps": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in CONFIGS if table().get(p.stem) == ("yes", "yes")])
def test_a_run_is_trained_written_and_read_elsewhere(path, tmp_path, call):
    run, overrides = tmp_path / "run", [f"--config={n}={v}" for n, v in (SIZES | SMALL).items()]
    code, _, err = call(train.main, f"--config_file={path}", f"--output_dir={run}", *overrides)
    assert code == 0, err
    assert "lsh.lsh.rotations = None" in (run / "config.gin").read_text()
    for name, other in (("hf", "transformers"), ("model.pkl.gz", "Trax's own model")):
        code, out, err = call(command.main, f"--from={run}", f"--to={tmp_path / name}")
        assert (code, err) == (0, "") and "note: " not in out
        assert f"from {other}" in out or "transformers, which is not installed" in out
        flags = [f"--from={tmp_path / name}", f"--to={tmp_path / 'back'}{name[0]}"]
        if name != "hf":
            flags += [f"--config_file={run / 'config.gin'}"]
        code, _, err = call(command.main, *flags)
        assert (code, err) == (0, "")
