"""No code of a run's folder runs when the folder is read, unless --trust_config says so."""

import contextlib
import json
import shutil
import sys
from pathlib import Path

import gin
import jax
import numpy as np
import pytest

import evaluate
import generate
from reformax.cli import config, configs, parsed, trust
from reformax.convert import __main__ as convert
from reformax.convert import run_folder
from reformax.convert.spec import Op, Spec
from reformax.data import wmt
from reformax.training import loop, manifest

ROOT = Path(__file__).resolve().parents[2]
DYNAMIC = "from __gin__ import dynamic_registration\n"
HEAD = f"{DYNAMIC}from reformax.training import loop\n"
MKDIR = "os.mkdir.path = 'marker'\n"

# Each writes a file or a folder `marker` where it is trusted. `evil` is a module, and a package, in
# the working directory that does so when it is imported.
HOSTILE = {
    "a program": f"{HEAD}import subprocess\nloop.train.task = @subprocess.check_output()\n"
    "subprocess.check_output.args = ['touch', 'marker']",
    "a function of the system": f"{HEAD}import os\nloop.train.task = @os.mkdir()\n{MKDIR}",
    "under another name": f"{HEAD}import os as lm\nloop.train.task = @lm.mkdir()\n"
    "lm.mkdir.path = 'marker'",
    "under the name of another": f"{HEAD}from reformax.models import lm\nimport os as lm\n"
    "loop.train.task = @lm.mkdir()\nlm.mkdir.path = 'marker'",
    "by a dotted import": f"{HEAD}import os.path\nloop.train.task = @os.mkdir()\n{MKDIR}",
    "by a module's import": f"{HEAD}from os import path\nloop.train.task = @path.os.mkdir()\n"
    "path.os.mkdir.path = 'marker'",
    "by an alias's import": f"{HEAD}import os.path as p\nloop.train.task = @p.os.mkdir()\n"
    "p.os.mkdir.path = 'marker'",
    "by an import of reformax": f"{HEAD}from reformax.data import files\n"
    "loop.train.task = @files.os.mkdir()\nfiles.os.mkdir.path = 'marker'",
    "by the whole of reformax": f"{HEAD}import reformax\n"
    "loop.train.task = @reformax.data.files.os.mkdir()\n"
    "reformax.data.files.os.mkdir.path = 'marker'",
    "a writer of reformax": f"{HEAD}from reformax.training import folder\n"
    "loop.train.task = @folder.make_output_dir()\nfolder.make_output_dir.path = 'marker'",
    "gin by reformax": f"{HEAD}from reformax.cli import config as c\n"
    "loop.train.task = @c.gin.parse_config()\nc.gin.parse_config.bindings = 'import evil'",
    "a writer of jax": f"{HEAD}import jax\nloop.train.task = @jax.numpy.save()\n"
    "jax.numpy.save.file = 'marker'\njax.numpy.save.arr = 1",
    "by an import of optax": f"{HEAD}import optax\nloop.train.task = @optax._src.base.jnp.save()\n"
    "optax._src.base.jnp.save.file = 'marker'\noptax._src.base.jnp.save.arr = 1",
    "in a macro": f"{HEAD}import os\nx = @os.mkdir()\nloop.train.task = %x\n{MKDIR}",
    "in scopes": f"{HEAD}import os\nloop.train.task = @a/b/os.mkdir()\n"
    "a/b/os.mkdir.path = 'marker'",
    "in containers": f"{HEAD}import os\nloop.train.task = [{{'x': (1, @os.mkdir())}}]\n{MKDIR}",
    "as a key": f"{HEAD}import os\nloop.train.task = {{@os.mkdir(): 1}}\n{MKDIR}",
    "in a block": f"{HEAD}import os\nloop.train:\n  task = @os.mkdir()\nos.mkdir:\n"
    "  path = 'marker'\n",
    "by a singleton": f"{HEAD}import os\nloop.train.task = @x/gin.singleton()\n{MKDIR}"
    "x/gin.singleton.constructor = @os.mkdir",
    "by gin's own macro": f"{HEAD}import os\nloop.train.task = @x/gin.macro()\n{MKDIR}"
    "x/gin.macro.value = @os.mkdir()",
    "an import alone": f"{HEAD}import evil",
    "a package": f"{HEAD}import pack.evil as lm",
    "an import from a package": f"{HEAD}from pack import evil",
    "an import without names": "import evil",
    "an import before names": f"import evil\n{DYNAMIC}",
    "a namesake of gin's": "import __gin__.dynamic_registration\n",
    "an include": f"{HEAD}include 'evil.gin'",
    "an include of a package": f"{HEAD}include 'pack/evil.gin'",
    "after what is right": f"{HEAD}from reformax.data import reverse\n"
    "loop.train.task = @reverse.reverse()\nreverse.reverse.n_eval = 4\nimport evil",
    "after an error": f"{HEAD}import evil\nloop.train.steps = (",
    # A name that is bound twice: gin runs both modules.
    "an alias rebound": f"{HEAD}import evil as q\nimport optax as q",
    "an alias rebound by from": f"{HEAD}import evil as q\nfrom reformax.models import lm as q",
    "an import rebound": f"{HEAD}import evil\nimport optax as evil",
    "an import rebound by from": f"{HEAD}import evil\nfrom reformax.models import lm as evil",
    "from rebound": f"{HEAD}from pack import evil\nimport jax.nn as evil",
    "from with an alias rebound": f"{HEAD}from pack import evil as q\nimport optax as q",
    "a package rebound": f"{HEAD}import pack.evil\nimport optax as pack",
    "rebound to what the name was": f"{HEAD}import optax\nimport evil as optax\nimport optax",
    "rebound after use": f"{HEAD}import optax as q\nx = @q.adam()\nimport evil as q\n"
    "import optax as q",
    "rebound in a block": f"{HEAD}import evil as q\nloop.train:\n  steps = 1\nimport optax as q",
}
# What is refused although it does no harm by itself.
REFUSED = {
    "training": f"{HEAD}loop.train.task = @loop.train()",
    "a private name": f"{HEAD}from reformax.models import packing\n"
    "loop.train.task = @packing._begins()",
    "a private module": f"{HEAD}from optax._src import base\nloop.train.task = @base.identity()",
    "a method": f"{HEAD}from reformax.models import lm\n"
    "loop.train.task = @lm.ReformerLM.init_params()",
    "a download": f"{HEAD}from reformax.data import tfds_builders\n"
    "loop.train.task = @tfds_builders.columns()",
    "a converter": f"{HEAD}from reformax.convert import hugging_face\n"
    "loop.train.task = @hugging_face.write()",
    "a class of data": f"{HEAD}from reformax.data import vocabulary\n"
    "loop.train.task = @vocabulary.SentencePieces()",
    "a layer by a model's import": f"{HEAD}from reformax.models import base\n"
    "loop.train.task = @base.FeedForward()",
    "an unpickler": f"{HEAD}import pickle\nloop.train.model = @pickle.load",
    "a binding": f"{HEAD}import numpy\nnumpy.load.allow_pickle = True",
    "a name of two modules": f"{HEAD}import optax as q\nimport jax.nn as q",
    "gin's name": f"{HEAD}import optax as gin\nloop.train.task = @gin.adam()",
}
# What is not there, so that nothing has to be refused.
MISSING = {
    "a name that no import binds": f"{HEAD}loop.train.task = @os.mkdir()",
    "a name that is there later": f"{HEAD}import reformax\n"
    "loop.train.task = @reformax.convert.nothing.write()\nfrom reformax.convert import spec",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory, on Python's path, with modules that leave a mark."""
    mark = "open('marker', 'w').close()\n"
    (tmp_path / "evil.py").write_text(mark)
    for package in ("pack", "__gin__"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(mark)
    (tmp_path / "pack/evil.py").write_text(mark)
    (tmp_path / "__gin__/dynamic_registration.py").write_text(mark)
    for path in ("evil.gin", "pack/evil.gin"):
        (tmp_path / path).write_text("import evil\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    _forget()


def _forget():
    """Lets the next import of the modules above run them again."""
    for name in [n for n in sys.modules if n.split(".")[0] in ("evil", "pack", "__gin__")]:
        del sys.modules[name]


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_code_of_a_config_does_not_run(text, folder):
    with pytest.raises(config.ConfigError) as error:
        config.parse_saved(text, "run/config.gin")
    assert not list(folder.glob("marker*"))
    line = str(error.value)
    assert "\n" not in line and ("--trust_config" in line or "EOF" in line)
    # Where it is trusted it runs: the row is an attack.
    with contextlib.suppress(Exception):
        config.parse_saved(text, "run/config.gin", trusted=True)
        parsed.bindings(loop.train)
    assert list(folder.glob("marker*"))


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_other_names_are_refused(text, folder):
    with pytest.raises(config.ConfigError, match="--trust_config") as error:
        config.parse_saved(text, "run/config.gin")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "line",
    [
        "\x1b]0;x\x07 = @os.x",
        "x = @loop.\x1b[31mtrain",
        "x = (lambda: 1)",
        f"x = {'9' * 10_000}",
        "x = {[1]: 2}",
        f"x = @{'a/' * 5000}os.x()",
        "from reformax.ops import lsh\nx = @lsh.os.system()",
    ],
)
def test_a_config_that_cannot_be_read_is_one_printable_line(line):
    with pytest.raises(config.ConfigError) as error:
        config.parse_saved(f"{HEAD}{line}\n", "run/config.gin")
    assert str(error.value).isprintable() and len(str(error.value)) < 700


def test_gin_imports_what_was_checked_and_nothing_else(folder, monkeypatch):
    monkeypatch.setattr(trust.Names, "check", lambda *args: None)
    for line in ("import evil", "import pack.evil as q", "from pack import evil"):
        with pytest.raises(config.ConfigError, match="--trust_config"):
            config.parse_saved(f"{HEAD}{line}", "run/config.gin")
    assert not list(folder.glob("marker*"))


def test_a_name_that_stands_for_one_module_may_be_bound_twice(folder):
    text = f"{HEAD}import jax.nn\nimport jax\nimport jax.nn.initializers\nx = @jax.nn.relu\n"
    config.parse_saved(text, "run/config.gin")
    assert gin.query_parameter("x/gin.macro.value").configurable.wrapped is jax.nn.relu


def test_overrides_of_a_saved_config_are_the_users_own(folder):
    config.parse_saved(f"{HEAD}import optax\n", "run/config.gin", ["import evil"])
    assert list(folder.glob("marker*"))


@pytest.mark.parametrize("text", MISSING.values(), ids=MISSING)
def test_names_that_are_not_there_are_told(text, folder):
    with pytest.raises(config.ConfigError) as error:
        config.parse_saved(text, "run/config.gin")
    assert "\n" not in str(error.value)


def test_the_line_names_the_function_and_its_place(folder):
    text = f"{HEAD}from tests.training import tiny\n\nloop.train.model = @small/tiny.TinyLM\n"
    with pytest.raises(config.ConfigError) as error:
        config.parse_saved(text, "run/config.gin")
    line = str(error.value)
    assert line.startswith("the config of a run names tests.training.tiny.TinyLM, which is no mod")
    assert line.endswith("(run/config.gin, line 5): loop.train.model = @small/tiny.TinyLM")
    config.parse_saved(text, "run/config.gin", trusted=True)
    assert parsed.described(loop.train, "model").function.__name__ == "TinyLM"


def test_what_a_terminal_obeys_is_not_printed(folder):
    with pytest.raises(config.ConfigError) as error:
        config.parse_saved(f"{HEAD}import evil  # \x1b[2J\x07", "run/config.gin")
    assert "\x1b" not in str(error.value) and "evil" in str(error.value)


@pytest.mark.parametrize("path", sorted(configs.FOLDER.rglob("*.gin")), ids=lambda p: p.stem)
def test_configs_of_this_package_are_read_back(path):
    """Every name and every parameter in them exists."""
    config.parse([str(path)])
    text = gin.config_str()
    config.parse_saved(text, "config.gin")
    assert gin.config_str() == text


def test_functions_of_jax_and_optax_are_read(folder):
    config.parse_saved(
        f"{HEAD}import jax\nimport jax.nn as nn\nimport optax\nfrom optax import schedules\n"
        "from jax.nn import initializers\nfrom reformax.models import lm\n"
        "loop.train.model = @lm.ReformerLM\nlm.ReformerLM.ff_activation = @jax.nn.relu\n"
        "small/lm.ReformerLM.ff_activation = @nn.silu\nloop.train.optimizer = @optax.adam()\n"
        "optax.adam.learning_rate = @schedules.constant_schedule()\n"
        "schedules.constant_schedule.value = 0.1\nx = @initializers.zeros",
        "config.gin",
    )
    assert parsed.bindings(loop.train, ["optimizer"])["optimizer"].init({}) is not None
    assert parsed.described(loop.train, "model").arguments["ff_activation"].function is jax.nn.relu


def test_what_a_macro_names_is_read_in_its_scope(folder):
    """As a run's config.gin has it, which gin writes and reads so; to any depth."""
    config.parse_saved(
        f"{HEAD}from reformax.models import designs\nfrom reformax.models import lm\n"
        "from reformax.ops import local\n"
        "attention = (@local.local(), @far/local.local())\ndesign = @designs.llama()\n"
        "loop.train.model = @lm.TransformerLM\nlm.TransformerLM.attention_type = %attention\n"
        "lm.TransformerLM.design = %design\ndesign/designs.llama.rotary_base = 7.0\n"
        "attention/local.local.chunk_len = 16\nfar/local.local.chunk_len = 32\n"
        "local.local.chunk_len = 64\nlm.TransformerLM.vocab_size = 256\n"
        "lm.TransformerLM.pos_type = 'rotary'",
        "config.gin",
    )
    spec = Spec.of_config()
    assert [op.options["chunk_len"] for op in spec.attention] == [16, 32]
    assert spec.design.rotary_base == 7.0
    model = parsed.bindings(loop.train, ["model"])["model"](mode="eval")
    assert [op.chunk_len for op in model.attention_type] == [16, 32]  # as gin builds it
    assert model.design.rotary_base == 7.0


SIZES = dict(d_model=8, d_ff=12, d_attention_key=4, d_attention_value=4, n_heads=2, n_layers=1)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of this package's command, which needs no training."""
    spec = Spec.make("ReformerLM", [Op("local", dict(chunk_len=4))], **SIZES, vocab_size=256)
    model, rng = spec.build(), np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: model.init_params(jax.random.key(0), (1, 8)))
    params = jax.tree.map(lambda w: rng.normal(0, 0.3, w.shape).astype(np.float32), shapes)
    folder = tmp_path_factory.mktemp("trust") / "run"
    return run_folder.write(folder, spec, params, {}, "A test.")


def change(folder, step=0, **values):
    """Changes checkpoint.json, and the manifest with it, as one who wishes harm does."""
    checkpoint = folder / f"checkpoints/{step}"
    path = checkpoint / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    (checkpoint / "manifest.json").unlink()
    manifest.write(checkpoint)


@pytest.mark.parametrize("place", ["checkpoint.json", "config.gin"])
@pytest.mark.parametrize(
    "main, flags",
    [
        (evaluate.main, ["--output_dir=run", "--data_dir=evil.py"]),
        (generate.main, ["--output_dir=run", "--prompt=a", "--max_new_tokens=1"]),
        (convert.main, ["--from=run", "--to=made.pkl.gz"]),
    ],
    ids=["evaluate", "generate", "convert"],
)
def test_the_scripts_run_no_code_of_a_folder(main, flags, place, run, folder, call):
    shutil.copytree(run, folder / "run")
    text = (folder / "run/config.gin").read_text()
    hostile = f"{text}\nimport os\n{MKDIR}loop.train.batch_size = @os.mkdir()\n"
    if place == "config.gin":  # it counts where the checkpoint has no config
        (folder / "run/config.gin").write_text(hostile)
        change(folder / "run", config=None)
    else:
        change(folder / "run", config=hostile)
    code, out, err = call(main, *flags)
    assert (code, out) == (2, "") and not (folder / "marker").exists()
    assert err.count("\n") == 1 and f"{place}, line " in err
    assert "names os.mkdir, which is no model" in err and "--trust_config" in err
    assert not (folder / "made.pkl.gz").exists()


@pytest.mark.parametrize("dataset", ["community:a/de-en", "huggingface:a/de-en", "wmt14/de-en"])
def test_wmt_takes_datasets_of_wmt_alone(dataset):
    """tensorflow-datasets would download code of another name's owner and run it."""
    source, target = dataset.partition("/")[2].split("-")
    with pytest.raises(ValueError, match="dataset='.*' is none of WMT"):
        wmt.wmt(dataset=dataset, source=source, target=target)


def test_wmt_reads_no_pair_that_its_dataset_has_not(tmp_path):
    """tensorflow-datasets would import what features.json of that folder names."""
    place = tmp_path / "wmt14_translate/xx-yy/1.0.0"
    place.mkdir(parents=True)
    task = wmt.wmt(str(tmp_path), "wmt14_translate/xx-yy", source="xx", target="yy")
    with pytest.raises(OSError, match="wmt14_translate has no xx-yy"):
        task.n_targets("test")
