"""Wrong flags, settings, files and prompts, made from what the scripts and the package declare.

A flag joins by its type, `flags.of(Size)`, and a setting by its annotation: each gets every value
below. Values that are not what is declared must be refused. The others may be refused or taken, as
they are right or not. A flag of no declared type needs values of its own in `FREE`.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import importlib
import inspect
import os
import pkgutil
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from reformax import data, models, ops
from reformax.cli import evaluate, generate, train
from reformax.convert import __main__ as convert_main
from reformax.declared import fits, hints_of
from reformax.models.base import Model, Residual, Reversible
from reformax.ops.base import AttentionOp
from reformax.task import Task

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {"train": train, "evaluate": evaluate, "generate": generate, "convert": convert_main}


class Case(NamedTuple):
    """A call of a script. `{root}` in its flags is the folder that `prepare` fills."""

    script: str
    argv: tuple[str, ...]
    must_refuse: bool = True
    stdin: bytes = b""

    def __str__(self) -> str:
        """The command in a short line."""
        text = " ".join((self.script, *self.argv))
        return repr(text if len(text) < 160 else text[:157] + "...")[1:-1]


# Arguments that the loop passes itself, whatever a config says.
PASSED = {"mode"}
# Modules that load tensorflow-datasets, and have nothing that a config names.
NO_FACTORIES = {"enwik8_builder"}
# Values of a flag. A new kind of value goes here.
TEXTS = (
    *("", "x", "None", "True", "nan", "inf", "-inf", "-1", "0", "2", "1.5", "1e3", "12k", "0x10"),
    *("100000000", "99999999999999", "1" * 5000, "[1]", "~no-such-user/x", "²", "a\nb"),
)
# Values of a setting, as gin writes them; the second block stands for objects.
LITERALS = (
    *("'x'", "''", "None", "True", "-1", "0", "1.5", "-0.5", "2", "100000000", "1" * 30, "1e400"),
    *("[]", "(1, 'x')", "[[1]]", "{'a': 1}", "'float8'"),
)
OBJECTS: dict[str, Any] = {
    "@optimizer.adam": len,
    "@lm.ReformerLM": dict,
    "@text.text()": Task("", 2, *[len] * 3),
    "%nothing": None,
    "%itself": None,
}
# Values of flags that take any text.
FREE = {
    "config": (
        *("", "=", "=1", "steps", "steps=", "steps==1", "a b=1", "'", "length=2k", "steps=1;2"),
        *("loop.train.nosuch=1", "nosuch.f.x=1", "steps=@nosuch.f", "from nowhere import x"),
        *("include '{root}/itself.gin'", f"steps={'9' * 5000}", f"steps={'[' * 5000}"),
    ),
    "checkpoint": (
        *("-1", "9", "averag:5", "average", "average:", "average:0", "average:-1", "average:x"),
        *(f"average:{'9' * 30}", "9" * 30, "²", "", "1e3", "best ", "../1", "Latest"),
    ),
    "split": ("", "dev", "Train", "valid,test"),
    "prompt": (),  # any bytes are one
    "tasks": ("", ",", "needle,", "needle,,text", "nosuch", "needle,nosuch", "../text", "needle=1"),
    "n_hashes": (
        "",
        "0",
        "-1",
        "x",
        "1.5",
        "2,",
        "2,2",
        "2,0",
        "2;4",
        "2000",
        "9" * 30,
        "9" * 5000,
    ),
    "lengths": ("", "0", "-1", "x", "1.5", "8,", "8,0", "8;9", "9" * 30, "9" * 5000),
}


# Values of --config that only training reads: other scripts leave them alone.
OF_TRAINING = (
    *("steps=%steps", "steps=%nosuch", "steps=1e3", "optimizer.adamw.b1=2"),
    *("optimizer.adamw.learning_rate=@optimizer.adamw()", "loop.train.model=@lm.ReformerLM()"),
    *("loop.train.task=@text.text", "loop.train.optimizer=@optimizer.adamw"),
    *("loop.train.task=@lm.ReformerLM", "loop.train.model=@text.text"),
    *("lm.ReformerLM.attention_type=@local.local", "lm.ReformerLM.dtype='float33'"),
    *("lm.ReformerLM.ff_activation=@lm.ReformerLM", "lm.ReformerLM.n_layers=3"),
    *("loop.train.eval_length=1000000000", "lm.ReformerLM.n_layers=100000000"),
    *("loop.train.batch_size=100000000", "lm.ReformerLM.d_model=100000000"),
)


def flag_cases() -> Iterator[Case]:
    """Each value for each flag of each script."""
    for script, module in SCRIPTS.items():
        for action in module.parser()._actions:
            name = action.option_strings[-1].removeprefix("--")
            if isinstance(action, argparse._HelpAction | argparse._StoreTrueAction):
                yield Case(script, (*_right(script, name), f"--{name}=1"))
                continue
            hint = getattr(action.type, "hint", None)
            if hint is None and name not in FREE:
                raise TypeError(f"--{name} of {script} declares no type: give it flags.of(...)")
            for text in FREE.get(name, TEXTS):
                refused = name in FREE or not fits(action.type(text), hint)
                yield Case(script, (*_right(script, name), f"--{name}={text}"), refused)
        yield Case(script, (*_right(script), "--no_such_flag=1"))
        yield Case(script, (*_right(script), "no_such_argument"))
    for script in ("evaluate", "generate", "convert"):
        yield Case(script, ())
        for text in OF_TRAINING:
            yield Case(script, (*_right(script), f"--config={text}"), False)
    for text in OF_TRAINING:
        yield Case("train", (*_right("train"), f"--config={text}"))


def _right(script: str, without: str = "") -> tuple[str, ...]:
    """The flags of a call that works, but one."""
    search = without in ("beam_size", "length_penalty", "max_extra", "batch_tokens")
    run = "{root}/pairs" if search else "{root}/lm"
    flags = {
        "train": {"config_file": "{root}/lm.gin", "output_dir": "run"},
        "evaluate": {"output_dir": run},
        "generate": {"output_dir": run, "prompt": "3 4", "max_new_tokens": "2"},
        "convert": {"from": "{root}/lm", "to": "converted"},
    }[script]
    if search:
        flags.pop("max_new_tokens", None)
    return tuple(f"--{name}={value}" for name, value in flags.items() if name != without)


def setting_cases() -> Iterator[Case]:
    """Each value for each argument of each function that a config may name."""
    for name, function in configurables().items():
        hints = hints_of(function)
        for parameter in inspect.signature(function).parameters:
            if parameter == "output_dir" or parameter not in hints:
                continue
            for text in (*LITERALS, *OBJECTS):
                known = text not in ("%nothing", "%itself")
                value = OBJECTS[text] if text in OBJECTS else ast.literal_eval(text)
                refused = not (known and fits(value, hints[parameter]))
                refused &= parameter not in PASSED
                if not refused and name == "wmt.wmt":
                    continue  # it would ask the network
                overrides = (*_in_use(name), f"{name}.{parameter}={text}")
                if text == "%itself":
                    overrides = (*overrides, "itself=%itself")
                flags = (f"--config={line}" for line in overrides)
                yield Case("train", ("--config_file={root}/all.gin", *flags), refused)


@functools.cache
def modules() -> dict[str, ModuleType]:
    """The modules whose functions a config may name, by their last names."""
    found = {"loop": "reformax.training.loop", "optimizer": "reformax.training.optimizer"}
    for package in (ops, models, data):
        for module in pkgutil.iter_modules(package.__path__):
            if not module.ispkg and module.name not in NO_FACTORIES:
                found[module.name] = f"{package.__name__}.{module.name}"
    imported = {name: importlib.import_module(module) for name, module in sorted(found.items())}
    return {name: module for name, module in imported.items() if any(_named(module))}


def _named(module: ModuleType) -> Iterator[str]:
    """The names of a module's own functions and classes that have a role in a config."""
    for name, value in vars(module).items():
        own = getattr(value, "__module__", None) == module.__name__ and name[0] != "_"
        if own and _returns(value) is not None:
            yield name


def configurables() -> dict[str, Callable]:
    """The functions that a config names, or could name in another's place."""
    return {
        f"{name}.{own}": getattr(module, own)
        for name, module in modules().items()
        for own in _named(module)
    }


# What a function that a config names says it returns.
ROLES = ("Task", "AttentionOp", "Optimizer", "optax.Schedule", "Pattern")


def _returns(value: Any) -> str | None:
    """The role of a configurable; None for what no config would name."""
    if inspect.isclass(value):
        if issubclass(value, AttentionOp):
            return "AttentionOp" if dataclasses.is_dataclass(value) else None
        whole = issubclass(value, Model) and issubclass(value, Residual | Reversible)
        return "model" if whole else None
    if not inspect.isfunction(value):
        return None
    if value.__name__ == "train":
        return "loop"
    role = getattr(inspect.unwrap(value), "__annotations__", {}).get("return")
    checked = hasattr(value, "__wrapped__")
    return role if checked and role in ROLES else None


def _role_of(name: str) -> str | None:
    module, function = name.split(".")
    return _returns(getattr(modules()[module], function))


def _in_use(name: str) -> tuple[str, ...]:
    """The settings with which a run uses a function."""
    module = name.partition(".")[0]
    role = _role_of(name)
    if role == "AttentionOp":
        return (f"lm.TransformerLM.attention_type=@{name}()",)
    if role == "Pattern":
        use = f"block_sparse.block_sparse.pattern=@{name}()"
        return ("lm.TransformerLM.attention_type=@block_sparse.block_sparse()", use)
    if role == "model":
        pairs = ("loop.train.task=@reverse.reverse()",) if module == "seq2seq" else ()
        return (f"loop.train.model=@{name}", *pairs)
    if role == "Task":
        return (f"loop.train.task=@{name}()", *_pairs_model(module))
    if role == "Optimizer":
        return (f"loop.train.optimizer=@{name}()",)
    if role == "optax.Schedule":
        return (f"optimizer.adamw.learning_rate=@{name}()",)
    return ()


def _pairs_model(module: str) -> tuple[str, ...]:
    pairs = module in ("reverse", "text_pairs", "wmt")
    return ("loop.train.model=@seq2seq.Transformer",) if pairs else ()


def file_cases() -> Iterator[Case]:
    """Files and folders that are none, of another kind, or damaged; `prepare` makes them."""
    for name in (*BAD_GIN, "folder.gin", "missing.gin", "pipe.gin", "huge.gin"):
        yield Case("train", (f"--config_file={{root}}/{name}", "--output_dir=run"))
    for name in ("missing", "empty", "/dev/null", "{root}", "pipe.gin/x", "x" * 300):
        flags = ("--config_file={root}/lm.gin", f"--data_dir={{root}}/data/{name}")
        yield Case("train", flags, name != "{root}")
    for folder in ("/dev/null", "/proc/x", "{root}/lm.gin", "x" * 300):
        yield Case("train", ("--config_file={root}/lm.gin", f"--output_dir={folder}"))
        yield Case("evaluate", (f"--output_dir={folder}",))
        yield Case("convert", (f"--from={folder}", "--to=converted"))
    for name in DAMAGE:
        for script in ("evaluate", "generate"):
            prompt = ("--prompt=a", "--max_new_tokens=2") if script == "generate" else ()
            flags = (f"--output_dir={{root}}/damaged/{name}", "--checkpoint=latest", *prompt)
            yield Case(script, flags, False)
        convert_flags = (f"--from={{root}}/damaged/{name}", "--to=converted")
        yield Case("convert", convert_flags, False)
    for name in ("empty", "empty.pkl.gz", "noise.pkl.gz", "noise.safetensors", "no_model"):
        yield Case("convert", (f"--from={{root}}/data/{name}", "--to=converted"))
        more = ("--config_file={root}/lm.gin", "--to=converted.pkl.gz")
        yield Case("convert", (f"--from={{root}}/data/{name}", *more))
    yield Case("convert", ("--from={root}/lm", "--to={root}/lm"))


def prompt_cases() -> Iterator[Case]:
    """Prompts that are no text, no ids, or too long."""
    lm = ("--output_dir={root}/lm", "--max_new_tokens=2")
    pairs = ("--output_dir={root}/pairs",)
    for text in (b"", b"\xff\xfe\x00", b"\n\n", "é".encode()[:1], b"\x00" * 9):
        yield Case("generate", lm, False, text)
    yield Case("generate", (*lm, "--max_length=64"), True, b"a" * 10**7)
    for text in (b"99999", b"-1", b"x", b"3 4.5", b"\xff", "²".encode(), b"9" * 5000, b"0", b"1"):
        yield Case("generate", pairs, True, text)
    yield Case("generate", pairs, False, b"")
    yield Case("generate", pairs, False, b"\n\n3\n")
    for name in ("missing", "/dev/zero", "{root}", "{root}/pipe.gin/x"):
        yield Case("generate", (*lm, f"--prompt_file={name}"))
    yield Case("generate", (*lm, "--prompt=a", "--prompt_file={root}/lm.gin"))


def all_cases() -> list[Case]:
    """Every case, in a fixed order."""
    made = (flag_cases(), file_cases(), prompt_cases(), setting_cases())
    return list(dict.fromkeys(case for cases in made for case in cases))


# The files.

HEAD = "from __gin__ import dynamic_registration\n"
TINY = """
steps = 1
length = 16
itself = 1
loop.train.steps = %steps
loop.train.batch_size = 2
loop.train.length = %length
loop.train.progress = False
loop.train.eval_tokens = 1
loop.train.eval_whole = False
loop.train.optimizer = @optimizer.adamw()
"""
SIZES = {
    "lm.ReformerLM": "vocab_size = 256, d_model = 16, d_ff = 16, n_heads = 2, n_layers = 2",
    "lm.TransformerLM": "vocab_size = 256, d_model = 16, d_ff = 16, n_heads = 2, n_layers = 2",
    "seq2seq.Reformer": "input_vocab_size = 32, d_model = 16, d_ff = 16, n_heads = 2, "
    "n_encoder_layers = 1, n_decoder_layers = 1",
    "seq2seq.Transformer": "input_vocab_size = 32, d_model = 16, d_ff = 16, n_heads = 2, "
    "n_encoder_layers = 1, n_decoder_layers = 1",
    "local.local": "chunk_len = 8",
    "lsh.lsh": "chunk_len = 8",
    "block_sparse.block_sparse": "block_size = 8",
    "reverse.reverse": "n_eval = 4",
    "duplication.duplication": "length = %length, n_eval = 4",
    "text_pairs.text_pairs": "data_dir = '{root}/data/pairs', vocab_size = 32",
    "wmt.wmt": "data_dir = '{root}/data'",
    "text.text": "data_dir = '{root}/data/text'",
    "enwik8.enwik8": "data_dir = '{root}/data/text'",
    "stdlib.stdlib": "max_bytes = 100000",
}
LM = "loop.train.model = @lm.TransformerLM\nloop.train.task = @text.text()\n"
REFORMER = "loop.train.model = @lm.ReformerLM\nloop.train.task = @text.text()\n"
REFORMER += "lm.ReformerLM.attention_type = (@local.local(), @lsh.lsh())\n"
PAIRS = "loop.train.model = @seq2seq.Transformer\nloop.train.task = @reverse.reverse()\n"

BAD_GIN = {
    "empty.gin": b"",
    "noise.gin": bytes(range(256)) * 40,
    "zeros.gin": b"\0" * 100,
    "latin.gin": "größe = 'ö'".encode("latin-1"),
    "unfinished.gin": b"steps = '''x",
    "brackets.gin": b"steps = " + b"[" * 10_000,
    "itself.gin": b"include '{root}/itself.gin'\n",
    "first.gin": b"include '{root}/second.gin'\n",
    "second.gin": b"include '{root}/first.gin'\n",
    "no_module.gin": HEAD.encode() + b"from reformax.models import nothing\n",
    "no_include.gin": b"include 'nowhere.gin'\n",
    "html.gin": b"<!DOCTYPE html><html><body>404</body></html>",
    "json.gin": b'{"steps": 3}',
}
# What is damaged in a copy of a run: a file of it, and what becomes of its bytes.
DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "config_noise": ("config.gin", lambda data: bytes(range(256))),
    "config_empty": ("config.gin", lambda data: b""),
    "config_cut": ("config.gin", lambda data: data[: len(data) // 2]),
    "config_itself": ("config.gin", lambda data: data + b"\nsteps = %steps\n"),
    "manifest_cut": ("checkpoints/1/manifest.json", lambda data: data[:20]),
    "manifest_list": ("checkpoints/1/manifest.json", lambda data: b"[]"),
    "description_noise": ("checkpoints/1/checkpoint.json", lambda data: bytes(range(256))),
    "description_list": ("checkpoints/1/checkpoint.json", lambda data: b"[]"),
    "description_empty": ("checkpoints/1/checkpoint.json", lambda data: b""),
}


def prepare(root: Path) -> None:
    """Writes configs, data and bad files into a folder; the runs `lm` and `pairs` come next."""
    (root / "data" / "empty").mkdir(parents=True)
    (root / "data" / "no_model").mkdir()
    (root / "data" / "text").write_bytes(b"A line of text, and another one.\n" * 400)
    folder = root / "data" / "pairs"
    folder.mkdir()
    for name in ("train", "val", "test"):
        for language in ("en", "de"):
            lines = (f"{language} the line number {i} of all\n" for i in range(40))
            (folder / f"{name}.{language}").write_text("".join(lines))
    (root / "data" / "empty.pkl.gz").write_bytes(b"")
    for name in ("noise.pkl.gz", "noise.safetensors", "no_model/config.json"):
        (root / "data" / name).write_bytes(bytes(range(256)) * 9)
    for name, content in BAD_GIN.items():
        (root / name).write_bytes(content.replace(b"{root}", os.fsencode(root)))
    (root / "huge.gin").write_bytes(b"a = 1\n" * 10**6)
    (root / "folder.gin").mkdir()
    os.mkfifo(root / "pipe.gin")
    imports = "".join(
        f"from {module.__name__.rpartition('.')[0]} import {name}\n"
        for name, module in modules().items()
    )
    sizes = "".join(
        f"{name}.{one}\n" for name, text in SIZES.items() for one in text.split(", ")
    ).replace("{root}", str(root))
    for name, what in {"all": LM, "lm": REFORMER, "pairs": PAIRS}.items():
        (root / f"{name}.gin").write_text(HEAD + imports + TINY + sizes + what)


def damage(root: Path) -> None:
    """Makes the damaged copies of the run `lm`."""
    for name, (file, change) in DAMAGE.items():
        copy = root / "damaged" / name
        shutil.copytree(root / "lm", copy)
        (copy / file).write_bytes(change((copy / file).read_bytes()))
