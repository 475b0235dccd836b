"""The README and the pages of docs: their commands and snippets run, their links lead somewhere.

A page's commands run in their order, in a copy of the checkout, each made small by the rules of
`tests/pages.py`. A command without a rule fails. Python snippets run as they stand, but for the
sizes in `pages.SMALLER`. Pages that install the package, rather than a checkout, run by `.ci/walk`.
"""

import dataclasses
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
import unicodedata
from pathlib import Path

import pytest

import reformax.ops
from reformax.training.settings import TrainSettings
from tests import forked, pages
from tests.pages import PAGES, ROOT, blocks, commands, gin_files, page_name

SCRIPTS = ("train.py", "evaluate.py", "generate.py")
COPIED = (
    "benchmarks",
    "configs",
    "examples",
    "reformax",
    "tests",
    "tools",
    "pyproject.toml",
    *SCRIPTS,
)
GUIDE = "adding_an_attention.md"


def test_every_command_has_a_rule(tmp_path):
    for page in PAGES:
        text = page.read_text()
        _write_gin_files(text, tmp_path)
        for command in commands(text):
            for run in re.findall(r"--output_dir=(\S+)", command):  # as if it had been trained
                (tmp_path / run).mkdir(parents=True, exist_ok=True)
                (tmp_path / run / "config.gin").touch()
            pages.small(command, tmp_path, text)


@pytest.mark.parametrize("pattern, reason", pages.NOT_RUN.items())
def test_a_command_that_is_not_run_is_on_a_page_and_says_why(pattern, reason):
    found = {command for page in PAGES for command in commands(page.read_text())}
    assert reason and any(re.fullmatch(pattern, command) for command in found)


@pytest.mark.parametrize(
    "command, page, expected",
    [
        ("python train.py --config_file=mine.gin", "", "{} --config='d_model=16'"),
        ("python evaluate.py --stride=256", "", "python evaluate.py --stride=32"),
        (
            "reformax evaluate --output_dir=runs/four",
            "```gin\n# reformax train --config_file=a.gin\nloop.train.mesh = {'context': 4}\n```",
            "JAX_NUM_CPU_DEVICES=4 {}",
        ),
        ("X=1 taskset -c 1 python -m benchmarks.step", "", None),
        ("python -m benchmarks.reliability", "", "{}"),
        ("pip install 'dist/reformax-0.2.0-py3-none-any.whl[trax]'", "", None),
    ],
)
def test_a_command_is_made_small_by_a_rule(command, page, expected, tmp_path):
    # Sizes that the config does not set, sets by a macro or has below the small one stay.
    (tmp_path / "mine.gin").write_text("d_model = 128\nlength = 16\noptimizer.n = 3\nd_ff = %n\n")
    got = pages.small(command, tmp_path, page)
    assert got == (expected and expected.format(command))


WALKS = [page for page in PAGES if pages.is_walk(page.read_text())]


@pytest.mark.parametrize("page", WALKS, ids=page_name)
def test_a_page_for_readers_without_the_repository_needs_nothing_of_it(page):
    for command in commands(page.read_text()):
        assert re.match(r"(reformax|pip install(?! -e)) ", command), command


def test_pages_install_the_wheel_of_this_version():
    wheels = {
        name for page in PAGES for name in re.findall(r"reformax-[\w.-]+?\.whl", page.read_text())
    }
    assert wheels == {f"reformax-{reformax.__version__}-py3-none-any.whl"}


def test_the_version_is_the_same_everywhere():
    version = reformax.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(
        rf"^## {version} - \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )


@pytest.mark.parametrize("command", ["python other.py", "rm -r runs", "python -m benchmark.step"])
def test_an_unknown_command_fails(command, tmp_path):
    with pytest.raises(LookupError, match="no rule in tests/pages.py makes this command small"):
        pages.small(command, tmp_path)


def _copy_checkout(folder: Path) -> None:
    for name in COPIED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)
    (folder / "docs").mkdir()  # for plots


def _write_gin_files(text: str, folder: Path) -> None:
    for path, content in gin_files(text).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)


def _write_checkpoints(folder: Path) -> None:
    """A checkpoint of Hugging Face and one of Trax, under the names that the pages have."""
    from reformax.cli import config
    from reformax.convert import hugging_face, trax_models
    from reformax.convert.spec import Spec
    from tests.convert import test_gpt2, test_trax_gin
    from tests.convert.test_command import ENWIK8_LIKE, GIN, random_params

    hugging_face.write(folder / "reformer-enwik8", ENWIK8_LIKE, random_params(ENWIK8_LIKE))
    test_gpt2.saved(folder / "gpt2")
    (folder / "my.gin").write_text(GIN)
    config.parse([str(folder / "my.gin")])
    spec = Spec.of_config()
    trax_models.write_params(folder / "model.pkl.gz", spec, random_params(spec), 32)
    test_trax_gin.trax_run(folder / "trax_run", test_trax_gin.LEFT)


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
def compiled() -> Path:
    """The session's folder for what XLA compiles: many commands run the same small model."""
    return Path(os.environ["JAX_COMPILATION_CACHE_DIR"])


@pytest.fixture(scope="module")
def server(compiled):
    """Runs `python` and `reformax` with their imports done."""
    server = forked.Server(pages.environment(compiled))
    yield server
    server.close()


def _run(command: str, folder: Path, environment: dict[str, str], server: forked.Server) -> None:
    """What `pages.run` does, by the server where bash has nothing to do."""
    name, *arguments = shlex.split(command)
    if name == "reformax":
        name, arguments = "python", ["-m", "reformax", *arguments]
    if name != "python" or re.search(r"[|&;<>$*]", re.sub(r"'.*?'|\".*?\"", "", command)):
        pages.run(command, folder, environment)
        return
    done = server.run(arguments, folder)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def _environment(folder: Path, compiled: Path) -> dict[str, str]:
    """An environment in which `reformax` is the copy of the checkout, as a module and a command."""
    command = folder / ".bin/reformax"
    command.parent.mkdir()
    command.write_text('#!/bin/sh\nexec python -m reformax "$@"\n')
    command.chmod(0o755)
    return pages.environment(compiled, command.parent, PYTHONPATH=str(folder))


def _slug(heading: str) -> str:
    """The anchor that MkDocs gives a heading."""
    plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def test_the_table_of_settings_has_all_with_their_defaults():
    text = (ROOT / "docs/training.md").read_text().partition("| `loop.train.` |")[2]
    found = {}
    for row in text.partition("\n\n")[0].splitlines()[2:]:
        names, defaults = (re.findall("`(.+?)`", cell) for cell in row.split(" | ")[:2])
        values = re.findall(r"\([^)]*\)|[^, ]+", defaults[0]) if defaults else [None] * len(names)
        found |= dict(zip(names, values, strict=True))
    want = {field.name: _default(field) for field in dataclasses.fields(TrainSettings)}
    assert found == want


def _default(field: dataclasses.Field) -> str | None:
    """The default as a table says it; None: there is none."""
    if field.default_factory is not dataclasses.MISSING:
        return repr(field.default_factory())
    return None if field.default is dataclasses.MISSING else repr(field.default)


def _is_run(text: str) -> bool:
    return not all(map(pages.benchmark, commands(text)))


def _runs():
    """The pages with commands; a page of results by its sections, which do not need each other."""
    found = []
    for page in PAGES:
        name, text = page_name(page), page.read_text()
        parts = re.split(r"^## ", text, flags=re.MULTILINE) if name == "results.md" else [text]
        for part in filter(_is_run, () if pages.is_walk(text) else parts):
            test = name if len(parts) == 1 else f"{name}#{_slug(part.partition(chr(10))[0])}"
            found.append(pytest.param(name, part, id=test))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name, text", _runs())
def test_commands_run_in_order(name, text, tmp_path, compiled, server):
    _copy_checkout(tmp_path)
    pages.write_data(tmp_path)
    if "reformax.convert" in text or "reformax convert" in text:
        _write_checkpoints(tmp_path)
    if name == GUIDE:
        _add_the_attention(tmp_path)
    _write_gin_files(text, tmp_path)
    environment = _environment(tmp_path, compiled)
    scored = set()
    for command in commands(text):
        small = pages.small(command, tmp_path, text)
        if small is None:
            continue
        # Of evaluations that differ by their run alone the first runs; the others find their run.
        if match := re.fullmatch(r"python evaluate\.py (--output_dir=(\S+).*)", small):
            kind = match[1].replace(match[2], "")
            assert any((tmp_path / match[2] / "checkpoints").iterdir()), command
            if kind in scored:
                continue
            scored.add(kind)
        _run(small, tmp_path, environment, server)


# The guide's first snippets are parts of files: `_add_the_attention` writes them.
N_PARTS = {GUIDE: 5}
# Snippets that import these change them for good; tests/test_own_jax_model.py runs them.
CHANGED = re.compile(r"^(import|from) (levanter|maxtext)\b", re.MULTILINE)


def _snippets():
    found = []
    for page in PAGES:
        text = page.read_text()
        if pages.is_walk(text):
            continue
        texts = [block.text for block in blocks(text) if block.language == "python"]
        for number, text in enumerate(texts[N_PARTS.get(page_name(page), 0) :], start=1):
            if CHANGED.search(text):
                continue
            marks = [] if page.name == "README.md" else [pytest.mark.slow]
            found.append(pytest.param(text, id=f"{page_name(page)}-{number}", marks=marks))
    return found


@pytest.fixture
def strided(monkeypatch):
    """The guide's module, where its snippets import it from."""
    module = types.ModuleType("reformax.ops.strided")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(_guide()[0], "strided.py", "exec"), module.__dict__)
    monkeypatch.setattr(reformax.ops, "strided", module, raising=False)
    return module


def _write_run(folder: Path) -> None:
    """A run of an untrained model of bytes."""
    from reformax.convert import run_folder
    from reformax.convert.spec import Op, Spec
    from tests.convert.test_command import SIZES, random_params

    cycle = [Op("local", dict(chunk_len=8)), Op("lsh", dict(chunk_len=8, n_hashes=2))]
    spec = Spec.make("ReformerLM", cycle, **SIZES, vocab_size=256)
    run_folder.write(folder, spec, random_params(spec), {}, "A note.")


def test_a_snippet_defines_the_names_it_uses(tmp_path):
    for page in PAGES:
        texts = [block.text for block in blocks(page.read_text()) if block.language == "python"]
        for number, text in enumerate(texts[N_PARTS.get(page_name(page), 0) :], start=1):
            (tmp_path / f"{page.stem}_{number}.py").write_text(text)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F821", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("text", _snippets())
def test_a_snippet_runs(text, strided, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for library in ("flax", "equinox"):
        if re.search(rf"^(import|from) (reformax\.)?{library}\b", text, re.MULTILINE):
            pytest.importorskip(library)
    if "load_run(" in text:
        _write_run(tmp_path / "runs/quickstart")
    exec(compile(pages.smaller(text), "snippet", "exec"), {"__name__": "snippet"})


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
        path, _, anchor = re.sub("#only-(light|dark)$", "", target).partition("#")
        found = page.parent / path if path else page
        assert found.is_file(), target
        assert not anchor or anchor in _anchors(found), target


# Files that a run or the guide makes.
MADE = {
    "config.gin",
    "mytask.py",
    "reformax/ops/strided.py",
    "configs/attentions/strided.gin",
}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=page_name)
def test_files_that_are_named_exist(page):
    folders = (ROOT, ROOT / "reformax", *filter(Path.is_dir, (ROOT / "configs").iterdir()))
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
