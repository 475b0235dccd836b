"""The commands of the README and of the pages of docs: found there, made small by rules, and run.

Needs Python alone, so that `.ci/walk` runs pages in an environment that has a wheel of reformax and
nothing of the tests.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Commands that are not run, as patterns, and why.
NOT_RUN = {
    r"pip install -e '\.\[test\]' && pytest": ".ci/run runs it",
    r"pip install -e (\.|'\.\[[\w,]+\]')": ".ci/run installs",
    r"pip install -e '\.\[test,peers\]' && pytest -m peers": "PEERS=1 .ci/run runs it",
    r"pip download --no-deps --dest wheels -r \S+": "it downloads 53 MB",
    r"python -m tests\.peers\.table": "it computes what `pytest -m peers` does",
    r"python -m reformax\.convert .*--attention=.*": "tests/convert/test_other_attention.py does",
    r".*=runs/(qwen3|tuned)( .*)?": "tests/training/test_fine_tuning.py does",
    r"python train\.py .*--process_id=\d": "tests/training/test_processes.py runs them together",
    r"python docs/pictures/by_position\.py .*": "tests/test_pictures.py runs it",
    r"python train\.py --config_file=table\.gin": "tests/convert/test_configs.py builds its model",
}
INSTALL = re.compile(r"^pip install .*? && ")
BENCHMARK = re.compile(r"(?:^|.* )python -m (?:benchmarks|tools)\.(?!reliability)(\w+) ?(.*)")

# Values that make a run take seconds. A run gets those of the macros and arguments that its config
# sets to something larger,
SMALL = {
    "d_model": 16,
    "d_ff": 16,
    "d_head": 8,
    "n_heads": 2,
    "n_layers": 4,
    "scan_layers": True,
    "batch_size": 2,
    "length": 64,
    "steps": 2,
    "warmup_steps": 1,
    "optimizer.cosine.warmup_steps": 1,
    "loop.train.eval_length": 64,
    "loop.train.eval_stride": 32,
    "stages.Stage.batch_size": 2,
    "stages.Stage.length": 32,
    "text.text.length_borders": (100,),
    "pos_axial_shape": (8, 8),
    "pos_d_axial_embs": (8, 8),
}
# and these if its config imports a module of this name.
SMALL_OF = {
    "stdlib": {"stdlib.stdlib.max_bytes": 20_000},
    "reverse": {"reverse.reverse.n_eval": 4},
    "pathfinder": {
        "length": 1024,  # of 32 x 32 pixels
        "n_heads": 4,  # as many as dilations
        "pathfinder.pathfinder.n_train": 4,
        "pathfinder.pathfinder.n_eval": 2,
    },
    "listops": {
        "listops.listops.min_length": 5,
        "listops.listops.max_length": 60,
        "listops.listops.n_eval": 4,
    },
    "images": {
        "length": 48,
        "images.images.side": 4,
        "pos_axial_shape": (4, 4, 3),
        "pos_d_axial_embs": (8, 4, 4),
    },
    "text_pairs": {"vocab_size": 30},
    "wmt": {"vocab_size": 30},
    "seq2seq": {"n_layers": 2},
}
AVERAGED = {"steps": 5, "loop.train.eval_every": 1}  # of a page that averages five checkpoints

# What stands in snippets and gin files, and what a test computes instead.
SMALLER = {
    "loop.train.seed = [0, 1]": "loop.train.seed = [0]",
    "10_007": "133",
    "max_bytes=1_000_000": "max_bytes=20_000",
    "steps=20,": "steps=2,",
}


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    text: str


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    pattern = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
    return [Block(m[1], m[2]) for m in pattern.finditer(text)]


def commands_of(block: Block) -> list[str]:
    """The commands of a block: lines of bash, or the one that a gin file begins with.

    A file for `reformax sweep` is many runs; its page has the command once more.
    """
    if block.language == "gin":
        first = block.text.partition("\n")[0].removeprefix("# ")
        return [] if first.startswith("reformax sweep") else [first]
    if block.language != "bash":
        return []
    joined = re.sub(r"\s*\\\n\s*", " ", block.text)
    lines = [re.sub(r"\s\s+#.*", "", line).strip() for line in joined.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def commands(text: str) -> list[str]:
    """The commands of a page in order."""
    return [command for block in blocks(text) for command in commands_of(block)]


def gin_files(text: str) -> dict[str, str]:
    """The gin files of a page by the names that their first lines give."""
    texts = [block.text for block in blocks(text) if block.language == "gin"]
    return {re.search(r"(?:--config_file=|sweep )(\S+)", text)[1]: smaller(text) for text in texts}


def page_name(page: Path) -> str:
    """A page's path in the site."""
    return page.relative_to(ROOT).as_posix().removeprefix("docs/")


def is_walk(text: str) -> bool:
    """Whether a page installs the package itself: it is for readers without the repository."""
    return any(map(wheel_extras, commands(text)))


def wheel_extras(command: str) -> re.Match | None:
    """The match of `pip install WHEEL`, whose group 1 has the extras in their brackets."""
    wheel = r"dist/reformax-[\d.]+-py3-none-any\.whl"
    return re.fullmatch(rf"pip install '?{wheel}(\[[\w,]+\])?'?", command)


def benchmark(command: str) -> re.Match | None:
    """The match of a benchmark, whose groups have its module and its flags.

    tests/benchmarks/test_commands.py runs these.
    """
    return BENCHMARK.fullmatch(command)


def benchmarks() -> list[tuple[str, str]]:
    """The module and the flags of each benchmark that a page runs."""
    found = (command for page in PAGES for command in commands(page.read_text()))
    return [match.groups() for match in map(benchmark, found) if match]


def small(command: str, folder: Path, page: str = "") -> str | None:
    """The command made small.

    Args:
      command: as a page has it.
      folder: where it will run.
      page: the page's text.

    Returns:
      The command to run; None if it is one of `NOT_RUN`, or a benchmark.

    Raises:
      LookupError: there is no rule for it.
    """
    if wheel_extras(command) or benchmark(command):
        return None
    if any(re.fullmatch(pattern, command) for pattern in NOT_RUN):
        return None
    command = INSTALL.sub("", command)
    for pattern, flags in RULES.items():
        if re.search(rf"(^|\s){pattern}(\s|$)", command):
            # Behind the flags may stand a file for the output.
            call, arrow, output = command.partition(" > ")
            added = flags(command, folder, page)
            for flag in re.findall(r"--(?!config)\w+=", added):  # which is given once
                call = re.sub(rf" {flag}\S+", "", call)
            call = f"{_devices(call, page)}{call} {added}"
            return f"{call}{arrow}{output}".strip()
    raise LookupError(f"no rule in tests/pages.py makes this command small: {command}")


def _devices(command: str, page: str) -> str:
    """The variable that simulates the devices that a gin file of the page asks for."""
    meshes = "".join(
        re.findall(r"^loop\.train\.mesh = (.+)$", "\n".join(gin_files(page).values()), re.M)
    )
    n_devices = math.prod(map(int, re.findall(r": (\d+)", meshes)))
    wanted = n_devices > 1 and "JAX_NUM_CPU_DEVICES=" not in command
    return f"JAX_NUM_CPU_DEVICES={n_devices} " if wanted else ""


def _training(command: str, folder: Path, page: str) -> str:
    files = re.findall(r"(?:--config_file=|reformax sweep )(\S+)", command) or ["quickstart.gin"]
    text = "\n".join(config_text(name, folder) for name in files)
    modules = set(re.findall(r"(?:^|[@/])(\w+)\.\w+", text, re.MULTILINE))
    values = {name: value for name, value in SMALL.items() if _is_larger(name, value, text)}
    values |= dict(_shorter_cycles(text))
    for module in modules & SMALL_OF.keys():
        values |= SMALL_OF[module]
    if "%global_attention" in text:  # of windows.gin
        values["attention"] = "(@local.local(), %global_attention)"
    if "vocab_size=" in command and "vocabulary=" not in command:
        values["vocab_size"] = 290  # pieces of so small a text, and the 256 bytes
    if "eval_stride=" in command:
        values["loop.train.eval_stride"] = SMALL["length"]
    if "--checkpoint=average:5" in page:
        values |= AVERAGED
    flags = [f"--config='{name}={value}'" for name, value in values.items()]
    if "wmt" in modules:
        flags.append("--config_file=without_download.gin")
    if modules & {"wmt", "text_pairs"}:
        flags.append("--data_dir=pairs")
    elif "@package_sources" in command:
        flags.append("--config='package_sources.package_sources.wheels=\"wheels/list.txt\"'")
    elif "enwik8" in modules:
        flags.append("--data_dir=enwik8.zip")
    elif "FILE_OR_FOLDER" in command:
        flags.append("--data_dir=my_texts")
    return " ".join(flags)


def config_text(name: str, folder: Path) -> str:
    """The text of a config and of all that it includes, each before the file that includes it."""
    configs = ROOT / "configs"
    places = [folder / name, ROOT / name, *configs.rglob(Path(name).name)]
    text = next(path for path in places if path.is_file()).read_text()
    included = re.findall(r"^include '(.+)'$", text, re.MULTILINE)
    return "\n".join([*(config_text(other, folder) for other in included), text])


def _shorter_cycles(text: str) -> Iterator[tuple[str, str]]:
    """A cycle that repeats an algorithm with each of its two once: XLA compiles every place."""
    for name, cycle in re.findall(r"^([\w./]+) = \((@.+)\)$", text, re.MULTILINE):
        distinct = list(dict.fromkeys(cycle.split(", ")))
        if len(distinct) == 2 < len(cycle.split(", ")):
            yield name, f"({', '.join(distinct)})"


def _is_larger(name: str, value, text: str) -> bool:
    """Whether the config sets `name` to something: no macro, no empty shape, no smaller number."""
    found = re.findall(rf"^{re.escape(name)} = (.+)$", text, re.MULTILINE)
    if not found or found[-1].startswith("%") or found[-1] == "()":
        return False
    return not (found[-1].isdigit() and int(found[-1]) < value)


def _evaluation(command: str, folder: Path, page: str) -> str:
    small = {"--stride": 32, "--length": 64, "--lengths": 1024}
    flags = [f"{flag}={value}" for flag, value in small.items() if f" {flag}=" in command]
    return " ".join([*flags, "--limit=2"] if "--tasks=" in command else flags)


def _generation(command: str, folder: Path, page: str) -> str:
    run = re.search(r"--output_dir=(\S+)", command)[1]
    translates = "seq2seq" in (folder / run / "config.gin").read_text()
    return "" if translates or "--png" in command else "--max_new_tokens=8"


def _preparation(command: str, folder: Path, page: str) -> str:
    if "--list" in command or "--prune=" in command:
        return "--cache_dir=cache"  # not the cache of who runs the tests
    return "--vocab_size=290" if "--vocab_size=" in command else ""


def _tests(command: str, folder: Path, page: str) -> str:
    return "-q -n 0" if " -k " in command else "--collect-only -q -n 0"


def _nothing(command: str, folder: Path, page: str) -> str:
    return ""


# The flags that make a command small, by what it calls.
RULES: dict[str, Callable[[str, Path, str], str]] = {
    r"(python train\.py|reformax train|reformax sweep)": _training,
    r"(python evaluate\.py|reformax evaluate)": _evaluation,
    r"(python generate\.py|reformax generate)": _generation,
    r"(python -m reformax\.convert|reformax convert)": _nothing,
    r"reformax prepare": _preparation,
    r"reformax (configs|runs)": _nothing,
    r"python -m benchmarks\.reliability": _nothing,  # lists its campaigns
    r"pytest": _tests,
    r"pip install --no-deps trax": _nothing,
}


def smaller(snippet: str) -> str:
    """A snippet or gin file with the sizes of `SMALLER`."""
    for large, small in SMALLER.items():
        snippet = snippet.replace(large, small)
    return snippet


def write_data(folder: Path) -> None:
    """A text, chats and aligned sentences, under the names that the pages have."""
    text = b"the cat sat on the mat, and the dog ran after it.\n" * 80
    with zipfile.ZipFile(folder / "enwik8.zip", "w") as archive:
        archive.writestr("enwik8", text)
    for name in ("my_texts", "pairs"):
        (folder / name).mkdir()
    for name in ("my_texts/one.txt", "mine.txt"):
        (folder / name).write_bytes(text)
    books = [{"text": "a page of a book. " * n, "author": f"{n % 3}"} for n in range(1, 40)]
    (folder / "books.jsonl").write_text("".join(json.dumps(book) + "\n" for book in books))
    for name in ("one", "two"):
        (folder / "repositories" / name).mkdir(parents=True)
        for i in range(20):
            (folder / f"repositories/{name}/{i}.py").write_text(f"print({i}, 'of {name}')\n" * 9)
    for name in ("one", "two"):
        (folder / "my_classes" / name).mkdir(parents=True)
        for i in range(20):
            (folder / f"my_classes/{name}/{i}.txt").write_text(f"text {i} of class {name}")
    chats = [f'{{"prompt": "{i} cats?", "answer": "{i} mats."}}\n' for i in range(40)]
    (folder / "chats.jsonl").write_text("".join(chats))
    (folder / "wheels").mkdir()
    wheel = folder / "wheels/tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.py", text)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (folder / "wheels/list.txt").write_text(f"tiny==1.0 --hash=sha256:{digest}\n")
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


def environment(compiled: Path, *path: Path, **changed: str) -> dict[str, str]:
    """That of this process, in which `python` is this interpreter.

    Args:
      compiled: a folder for what XLA compiles, because many commands run the same small model.
      *path: folders that go first on PATH.
      **changed: more variables.
    """
    folders = [*map(str, path), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return os.environ | {
        "PATH": os.pathsep.join(folders),
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        **changed,
    }


def run(command: str, folder: Path, env: dict[str, str], stdin: str = "") -> str:
    """Runs a command of bash in a folder; returns what it wrote to stdout.

    Raises:
      AssertionError: it failed; with the end of what it wrote.
    """
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=env,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        raise AssertionError(f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout
