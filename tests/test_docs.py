"""The README and the pages of docs: their commands and snippets run, their links lead somewhere.

A page's commands run in their order, in a copy of the checkout, each made small by the flags of its
row in `COMMANDS`. A new command without a row fails. Python snippets run as they stand, but for the
sizes in `SMALLER`.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import types
import unicodedata
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

import reformax.ops

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SCRIPTS = ("train.py", "evaluate.py", "generate.py")
COPIED = ("benchmarks", "configs", "reformax", "tests", "pyproject.toml", *SCRIPTS)


def macros(**values) -> str:
    return " ".join(f"--config='{name}={value}'" for name, value in values.items())


# Flags that make a run take seconds.
SIZES = dict(d_model=16, d_ff=16, n_heads=2, n_layers=2)
STEPS = dict(steps=2, batch_size=2)
BYTES = macros(**SIZES | dict(n_layers=4), **STEPS, d_head=8, length=64, warmup_steps=1)
AXIAL = macros(
    **{
        "lm.ReformerLM.pos_axial_shape": "(8, 8)",
        "lm.ReformerLM.pos_d_axial_embs": "(8, 8)",
    }
)
STDLIB = f"{BYTES} {macros(**{'stdlib.stdlib.max_bytes': 20_000})}"
ENWIK8 = f"{BYTES} {macros(scan_layers=True)} --data_dir=enwik8.zip"
WINDOWS = macros(**{"loop.train.eval_stride": 32})
REVERSED = (
    f"{macros(**SIZES, **STEPS)} "
    f"{macros(**{'reverse.reverse.n_eval': 4, 'optimizer.cosine.warmup_steps': 1})}"
)
PAIRS = (
    f"{macros(**SIZES, **STEPS, length=64, vocab_size=30, scan_layers=True, warmup_steps=1)} "
    "--data_dir=pairs"
)
GUIDE = "adding_an_attention.md"
ELSEWHERE = None  # .ci/run runs the command itself

# The commands of the pages, and what makes them small.
COMMANDS: dict[str, str | None] = {
    "pip install -e . && python train.py": STDLIB,
    "pip install -e '.[test]' && pytest": ELSEWHERE,
    "pip install -e .": ELSEWHERE,
    # Training.
    "python train.py": STDLIB,
    "python train.py --config_file=configs/quickstart.gin --output_dir=runs/tutorial": STDLIB,
    "python train.py --output_dir=runs/more_hashes --config='lsh.lsh.n_hashes=4'": STDLIB,
    "python train.py --output_dir=runs/wider --config='d_model=256' --config='steps=500'": STDLIB,
    "python train.py --output_dir=runs/strict --config='lsh.lsh.strictly_causal=True'": STDLIB,
    "python train.py --output_dir=runs/resumed --config='loop.train.checkpoint_every=50'": STDLIB,
    "python train.py --config_file=mine.gin": STDLIB,
    "python train.py --config_file=near_and_far.gin": STDLIB,
    "python train.py --config_file=configs/strided.gin": STDLIB,
    "python train.py --config_file=configs/quickstart.gin --output_dir=runs/local "
    "--config='lm.ReformerLM.attention_type=(@local.local(),)'": STDLIB,
    "python train.py --config_file=configs/block_sparse.gin --output_dir=runs/blocks": STDLIB,
    "python train.py --config_file=configs/block_sparse.gin": STDLIB,
    "python train.py --config_file=configs/block_sparse.gin "
    "--config='lm.ReformerLM.attention_type=@dense.dense()'": f"{STDLIB} --output_dir=dense",
    "python train.py --config_file=configs/block_sparse.gin "
    "--config='lm.ReformerLM.attention_type=@block_sparse.block_sparse()'": (
        f"{STDLIB} --output_dir=butterfly"
    ),
    "python train.py --config_file=my_text.gin --data_dir=FILE_OR_FOLDER": (
        f"{BYTES} --data_dir=my_texts"
    ),
    "python train.py --config_file=my_text.gin --data_dir=my_texts --output_dir=runs/mine": BYTES,
    "python train.py --config_file=configs/reformer_enwik8.gin --output_dir=runs/enwik8 "
    "--config='steps=20000'": f"{ENWIK8} {AXIAL}",
    "python train.py --config_file=configs/reformer_enwik8_small.gin --data_dir=enwik8.zip "
    "--output_dir=runs/small": BYTES,
    "python train.py --config_file=configs/transformer_enwik8_ten_minutes.gin "
    "--data_dir=enwik8_prefix --output_dir=runs/transformer": f"{ENWIK8} {WINDOWS}",
    "python train.py --config_file=configs/reformer_enwik8_ten_minutes.gin "
    "--data_dir=enwik8_prefix --output_dir=runs/reformer": f"{ENWIK8} {WINDOWS}",
    # Translation.
    "python train.py --config_file=configs/transformer_reverse.gin": REVERSED,
    "python train.py --config_file=configs/reformer_reverse.gin": REVERSED,
    "python train.py --config_file=configs/reformer_reverse.gin --output_dir=runs/reverse": (
        REVERSED
    ),
    "python train.py --config_file=configs/transformer_multi30k.gin --data_dir=multi30k "
    "--output_dir=runs/transformer_multi30k": PAIRS,
    "python train.py --config_file=configs/reformer_multi30k.gin --data_dir=multi30k "
    "--output_dir=runs/reformer_multi30k": PAIRS,
    "python train.py --config_file=configs/transformer_multi30k.gin --data_dir=pairs "
    "--output_dir=runs/pairs --config='text_pairs.text_pairs.source=\"de\"' "
    "--config='text_pairs.text_pairs.target=\"en\"'": (
        f"{PAIRS} {macros(steps=5, **{'loop.train.eval_every': 1})}"
    ),
    "python train.py --config_file=configs/transformer_wmt_ende.gin --output_dir=runs/wmt": (
        f"--config_file=without_download.gin {PAIRS}"
    ),
    # Scoring and writing.
    "python evaluate.py --output_dir=runs/quickstart --split=test": "",
    "python evaluate.py --output_dir=runs/tutorial --split=test": "",
    "python evaluate.py --output_dir=runs/tutorial --split=test --stride=256": "--stride=32",
    "python evaluate.py --output_dir=runs/mine --split=test": "",
    "python evaluate.py --output_dir=runs/enwik8 --split=test": "",
    "python evaluate.py --output_dir=runs/small --split=test": "",
    "python evaluate.py --output_dir=runs/transformer --split=test": "",
    "python evaluate.py --output_dir=runs/reformer --split=test": "",
    "python evaluate.py --output_dir=runs/reverse --split=test": "",
    "python evaluate.py --output_dir=runs/transformer_reverse --split=test": "",
    "python evaluate.py --output_dir=runs/reformer_reverse --split=test": "",
    "python evaluate.py --output_dir=runs/transformer_multi30k --split=test": "",
    "python evaluate.py --output_dir=runs/reformer_multi30k --split=test": "",
    "python evaluate.py --output_dir=runs/pairs --split=test --checkpoint=average:5": "",
    "python generate.py --output_dir=runs/tutorial --prompt='def ' --max_new_tokens=200 --seed=0": (
        "--max_new_tokens=8"
    ),
    "python generate.py --output_dir=runs/quickstart --prompt='def ' --max_new_tokens=400 "
    "--seed=0": "--max_new_tokens=8",
    "python generate.py --output_dir=runs/quickstart --prompt='import ' --num_samples=4 "
    "--temperature=0.8 --top_p=0.95": "--max_new_tokens=8",
    "python generate.py --output_dir=runs/reverse --prompt='5 6 7 8'": "",
    "python generate.py --output_dir=runs/pairs --prompt_file=lines.txt > translated.txt": "",
    # Converting.
    "python -m reformax.convert --from=reformer-enwik8 --to=runs/enwik8": "",
    "python -m reformax.convert --from=reformer-enwik8 --to=runs/converted": "",
    "python -m reformax.convert --from=model.pkl.gz --config_file=my.gin --to=runs/from_trax": "",
    "python -m reformax.convert --from=runs/enwik8 --to=for_hugging_face": "",
    "python -m reformax.convert --from=runs/from_trax --to=mine.pkl.gz": "",
    # Measuring.
    "python -m benchmarks.step --lengths 65536": "--tiny --lengths 32",
    "python -m benchmarks.step --repeats 15": "--tiny --repeats 1",
    "python -m benchmarks.attention --peers --plot docs/attention.png": "--tiny --repeats 1",
    "python -m benchmarks.attention --exact": "--tiny --repeats 1",
    "python -m benchmarks.exact_attention --memory": "--tiny",
    "python -m benchmarks.exact_attention --curves --longest": "--tiny",
    "python -m benchmarks.block_sparse --peers --plot docs/block_sparse.png": "--tiny --repeats 1",
    "python -m benchmarks.recall": "--tiny",
    "python -m benchmarks.reliability.inputs": ELSEWHERE,  # tests/test_inputs.py
    "python -m benchmarks.reversible": "--tiny",
    "python -m benchmarks.duplication --length 1024 --steps 2000 --batch_size 16 --chunk_len 64": (
        "--tiny"
    ),
    "python -m benchmarks.generation": "--tiny",
    "python -m benchmarks.translation --sources=newstest2014.en --step --repeats=5": (
        "--tiny --repeats=1"
    ),
    "python -m benchmarks.translation --sources=newstest2014.en --sentences=1200 --repeats=2": (
        "--tiny --repeats=1"
    ),
    "OMP_NUM_THREADS=1 taskset -c 1 python -m benchmarks.translation --sources=newstest2014.en "
    "--sentences=96 --batch_tokens=1024": "--tiny --repeats=1",
    "python -m benchmarks.reliability": "",
    # Testing.
    "pytest tests/ops": "--collect-only -q -n 0",
    "pytest -m 'slow or not slow' tests/ops/test_random_cases.py --cases=10000": (
        "--collect-only -q -n 0"
    ),
    "pytest tests/ops/test_against_oracle.py tests/layers/test_attention.py "
    '-k "strided or every_op"': "-q -n 0",
}

# What stands in snippets, and what a test computes instead.
SMALLER = {
    "10_007": "133",
    "max_bytes=1_000_000": "max_bytes=20_000",
    "steps=20,": "steps=2,",
}


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    text: str


def blocks(text: str) -> list[Block]:
    pattern = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
    return [Block(m[1], m[2]) for m in pattern.finditer(text)]


def commands(text: str) -> list[str]:
    """The commands of a text in order, those that its gin files begin with among them."""
    found = []
    for block in blocks(text):
        if block.language == "bash":
            joined = re.sub(r"\s*\\\n\s*", " ", block.text)
            lines = [re.sub(r"\s\s+#.*", "", line).strip() for line in joined.splitlines()]
            found += [line for line in lines if line and not line.startswith("#")]
        elif block.language == "gin":
            found.append(block.text.partition("\n")[0].removeprefix("# "))
    return found


def gin_files(text: str) -> dict[str, str]:
    """The gin files of a text by the names that their first lines give."""
    texts = [block.text for block in blocks(text) if block.language == "gin"]
    return {re.search(r"--config_file=(\S+)", text)[1]: text for text in texts}


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix().removeprefix("docs/")


def test_every_command_has_a_row_and_every_row_a_command():
    found = {command for page in PAGES for command in commands(page.read_text())}
    assert found - COMMANDS.keys() == set(), "without a row in COMMANDS"
    assert COMMANDS.keys() - found == set(), "on no page"


def _copy_checkout(folder: Path) -> None:
    for name in COPIED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)
    (folder / "docs").mkdir()  # for plots


def _write_data(folder: Path) -> None:
    """A text, and aligned sentences, under the names that the pages have."""
    text = b"the cat sat on the mat, and the dog ran after it.\n" * 80
    with zipfile.ZipFile(folder / "enwik8.zip", "w") as archive:
        archive.writestr("enwik8", text)
    for name in ("my_texts", "pairs"):
        (folder / name).mkdir()
    (folder / "my_texts/one.txt").write_bytes(text)
    subjects, verbs = ("a man", "two dogs", "the child", "a woman"), ("walks", "runs", "sings")
    english = [f"{subject} {verb} in the park" for subject in subjects for verb in verbs]
    german = [line[::-1] for line in english]
    for split in ("train", "val", "test"):
        for language, lines in (("en", english), ("de", german)):
            (folder / f"pairs/{split}.{language}").write_text("\n".join(lines) + "\n")
    (folder / "lines.txt").write_text("\n".join(german[:2]) + "\n")
    (folder / "newstest2014.en").write_text("\n".join(english) + "\n")
    (folder / "without_download.gin").write_text(
        "from __gin__ import dynamic_registration\n"
        "from reformax.data import text_pairs\n"
        "from reformax.training import loop\n"
        "loop.train.task = @text_pairs.text_pairs()\n"
        "text_pairs.text_pairs.vocab_size = 30\n"
    )


def _write_checkpoints(folder: Path) -> None:
    """A checkpoint of Hugging Face and one of Trax, under the names that the pages have."""
    from reformax.cli import config
    from reformax.convert import hugging_face, trax_models
    from reformax.convert.spec import Spec
    from tests.convert.test_command import ENWIK8_LIKE, GIN, random_params

    hugging_face.write(folder / "reformer-enwik8", ENWIK8_LIKE, random_params(ENWIK8_LIKE))
    (folder / "my.gin").write_text(GIN)
    config.parse([str(folder / "my.gin")])
    spec = Spec.of_config()
    trax_models.write_params(folder / "model.pkl.gz", spec, random_params(spec), 32)


def _guide() -> list[str]:
    """The Python blocks of the guide to a new attention."""
    found = blocks((ROOT / "docs" / GUIDE).read_text())
    return [block.text for block in found if block.language == "python"]


def _add_the_attention(folder: Path) -> None:
    """Adds the guide's file and its row of the tests."""
    file, imports, counts, row, *_ = _guide()
    (folder / "reformax/ops/strided.py").write_text(file)
    rows = folder / "tests/ops/rows.py"
    start = rows.read_text().replace("\nclass Shape", f"\n{imports}\n\nclass Shape", 1)
    rows.write_text(f"{start}\n\n{counts}\n\nROWS += [\n{row}]\n")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Path:
    """A folder for what XLA compiles: many commands run the same small model."""
    return tmp_path_factory.mktemp("xla")


def _environment(folder: Path, compiled: Path) -> dict[str, str]:
    """That of this process; `python` and `reformax` are this interpreter and the copy."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return os.environ | {
        "PATH": path,
        "PYTHONPATH": str(folder),
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def _slug(heading: str) -> str:
    """The anchor that MkDocs gives a heading."""
    plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def _runs():
    """The pages with commands; a page of results by its sections, which do not need each other."""
    found = []
    for page in PAGES:
        name, text = page_name(page), page.read_text()
        parts = re.split(r"^## ", text, flags=re.MULTILINE) if name == "results.md" else [text]
        for part in filter(commands, parts):
            test = name if len(parts) == 1 else f"{name}#{_slug(part.partition(chr(10))[0])}"
            found.append(pytest.param(name, part, id=test))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name, text", _runs())
def test_commands_run_in_order(name, text, tmp_path, compiled):
    _copy_checkout(tmp_path)
    _write_data(tmp_path)
    if "reformax.convert" in text:
        _write_checkpoints(tmp_path)
    if name == GUIDE:
        _add_the_attention(tmp_path)
    for path, content in gin_files(text).items():
        (tmp_path / path).write_text(content)
    for command in commands(text):
        flags = COMMANDS[command]
        if flags is ELSEWHERE:
            continue
        small = re.sub(r"^pip install .*? && ", "", f"{command} {flags}")
        run = subprocess.run(
            ["bash", "-c", small],
            cwd=tmp_path,
            env=_environment(tmp_path, compiled),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert run.returncode == 0, f"{small}\n{run.stdout[-2000:]}\n{run.stderr[-2000:]}"


# The guide's first snippets are parts of files, which `_add_the_attention` writes.
N_PARTS = {GUIDE: 5}


def _snippets():
    found = []
    for page in PAGES:
        texts = [b.text for b in blocks(page.read_text()) if b.language == "python"]
        for number, text in enumerate(texts[N_PARTS.get(page_name(page), 0) :], start=1):
            marks = [] if page.name == "README.md" else [pytest.mark.slow]
            found.append(pytest.param(text, id=f"{page_name(page)}-{number}", marks=marks))
    return found


@pytest.fixture
def strided(monkeypatch):
    """The guide's module, where its snippets import it from."""
    module = types.ModuleType("reformax.ops.strided")
    exec(compile(_guide()[0], "strided.py", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(reformax.ops, "strided", module, raising=False)
    return module


@pytest.mark.parametrize("text", _snippets())
def test_a_snippet_runs(text, strided, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for large, small in SMALLER.items():
        text = text.replace(large, small)
    exec(compile(text, "snippet", "exec"), {"__name__": "snippet"})


def test_the_guide_s_attention_refuses_what_its_line_of_errors_says(strided):
    ((factory, options, message),) = eval(f"[{_guide()[4]}]", {"strided": strided})
    with pytest.raises(ValueError, match=f"^{message}$"):
        factory(**options)


def _anchors(page: Path) -> set[str]:
    outside = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return {_slug(m[1]) for m in re.finditer(r"^#+ (.*)$", outside, re.MULTILINE)}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=page_name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        found = page.parent / path if path else page
        assert found.is_file(), target
        assert not anchor or anchor in _anchors(found), target


# Files that a run or the guide makes.
MADE = {"config.gin", "reformax/ops/strided.py", "configs/strided.gin"}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=page_name)
def test_files_that_are_named_exist(page):
    folders = (ROOT, ROOT / "reformax", ROOT / "configs")
    for name in set(re.findall(r"`([\w/]+\.(?:py|gin))`", page.read_text())) - MADE:
        assert any((folder / name).is_file() for folder in folders), name


def test_the_site_has_every_page_and_module():
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page_name(page) for page in PAGES[1:])
    for page in PAGES:
        for module in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE):
            assert importlib.util.find_spec(module), module


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_what_is_read_first_is_short(page):
    assert len((ROOT / page).read_text().splitlines()) <= 120
