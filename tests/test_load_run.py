"""`reformax.load_run`: the model of a folder and its parameters, and no code of the folder."""

import jax
import numpy as np
import pytest

import reformax
from reformax.cli.config import ConfigError
from reformax.convert import run_folder
from tests.convert.test_command import ENWIK8_LIKE, random_params


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loaded") / "run"
    run_folder.write(folder, ENWIK8_LIKE, random_params(ENWIK8_LIKE), {}, "A note.")
    return folder


def test_a_run_is_its_model_and_its_parameters(folder):
    model, params = reformax.load_run(folder)
    assert (type(model).__name__, model.mode, model.d_model) == ("ReformerLM", "eval", 8)
    jax.tree.map(np.testing.assert_array_equal, params, random_params(ENWIK8_LIKE))
    overrides = ["lm.ReformerLM.dropout=0.5"]
    model, _ = reformax.load_run(str(folder), "latest", mode="train", overrides=overrides)
    assert (model.mode, model.dropout) == ("train", 0.5)


def test_parameters_may_stand_in_a_compiled_function(folder):
    """They are NumPy's, which takes no tokens that are traced."""
    model, params = reformax.load_run(folder)
    tokens, key = np.array([[1, 2, 3, 4]]), jax.random.PRNGKey(0)
    inside = jax.jit(lambda tokens: model.apply(params, tokens, rng=key))(tokens)
    given = jax.jit(lambda params, tokens: model.apply(params, tokens, rng=key))(params, tokens)
    np.testing.assert_allclose(inside, given, rtol=1e-5, atol=1e-6)


def test_a_folder_without_a_run(folder, tmp_path):
    for arguments, message in (
        ((tmp_path / "none",), "holds no run"),
        ((folder, "7"), "step 7"),
        ((folder, "newest"), "checkpoint=newest must be best"),
    ):
        with pytest.raises(ValueError, match=message) as raised:
            reformax.load_run(*arguments)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("folder", ["", "~no-such-user/run", 3])
def test_what_is_no_path_is_named_as_it_was_given(folder):
    with pytest.raises(ValueError, match="^folder is "):
        reformax.load_run(folder)


def test_no_code_of_a_folder_runs_unless_it_is_trusted(tmp_path, monkeypatch):
    text = run_folder.gin(ENWIK8_LIKE, "A note.")
    text = text.replace(" import loop\n", " import loop\nimport evil\n")
    monkeypatch.setattr(run_folder, "gin", lambda *args: text)
    run_folder.write(tmp_path / "run", ENWIK8_LIKE, random_params(ENWIK8_LIKE), {}, "A note.")
    (tmp_path / "evil.py").write_text("open('marker', 'w').close()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="the config of a run names evil"):
        reformax.load_run("run")
    assert not (tmp_path / "marker").exists()
    reformax.load_run("run", trust_config=True)
    assert (tmp_path / "marker").exists()
