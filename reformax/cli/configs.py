"""Lists the configs that come with reformax, or prints one: `reformax configs [NAME]`.

`reformax train --config_file=NAME` finds them by these names, wherever it is started. A config of
the same name in the working directory goes first. A config of your own may include them:
`include 'reformer.gin'`. The name of a subject, such as `translation`, lists its configs alone.
"""

from __future__ import annotations

import difflib
import re
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path

from reformax.cli import flags, messages
from reformax.declared import SettingError

FOLDER = Path(__file__).resolve().parents[1] / "configs"
PARTS = "parts"  # the folder of files to be included
# The other folders, in the order of the list.
SUBJECTS = {
    "text": "language models of your own text",
    "fine_tuning": "more training of a language model",
    "enwik8": "language models of enwik8",
    "attentions": "one model with each attention",
    "translation": "sentence pairs",
    "classification": "rows with a label; for rows of your own classify.gin of not_run",
    "not_run": "not run to their end",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Lists the configs or prints one."""
    args = parser().parse_args(argv)
    if args.name is not None and args.name not in SUBJECTS:
        _refuse_subject(args.name)
        print(find(args.name).read_text(), end="")
        return 0
    for subject in [args.name] if args.name else SUBJECTS:
        print(f"{SUBJECTS[subject]} (configs/{subject})\n")
        for path in sorted((FOLDER / subject).glob("*.gin")):
            _show(path.name, summary(path.read_text()))
        print()
    if args.name is None:
        parts = ", ".join(path.name for path in sorted((FOLDER / PARTS).glob("*")))
        _show("parts, to be included", parts)
        print(f"\n`reformax configs SUBJECT` lists one of {', '.join(SUBJECTS)}.")
    print("In names 37m is 37 million parameters, and 16k a window of 16,384 bytes or tokens.")
    return 0


def parser():
    """The flags."""
    parser = flags.parser(__doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="a config or a subject")
    flags.add_traceback(parser)
    return parser


def runs() -> list[Path]:
    """The configs that are runs, by name."""
    found = [path for path in FOLDER.rglob("*.gin") if not is_part(path)]
    return sorted(found, key=lambda path: path.stem)


def find(name: str) -> Path:
    """The path of a packaged config, by its name: `quickstart`, with .gin, or with configs/ too.

    Raises:
      SettingError: there is none of this name.
    """
    if (path := found(name)) is None:
        raise SettingError(f"no config {name}{nearest(name)}")
    return path


def _refuse_subject(name: str) -> None:
    """Raises `SettingError` for a name that is no config's but much the name of a subject."""
    near = difflib.get_close_matches(name.replace("-", "_"), SUBJECTS, n=1, cutoff=0.75)
    if near and found(name) is None:
        raise SettingError(f"no config or subject {name}; did you mean {near[0]}?")


def nearest(name: str) -> str:
    """'; did you mean A.gin or B.gin?' of the packaged configs, or what lists them."""
    near = messages.near(_stem(name), sorted(path.stem for path in FOLDER.rglob("*.gin")))
    if not near:
        return "; `reformax configs` lists those of the package"
    return f"; did you mean {' or '.join(f'{stem}.gin' for stem in near)}?"


def found(name: str) -> Path | None:
    """The path of a packaged config, by its name; None if there is none."""
    named = f"{_stem(name)}.gin"
    bare = Path(name).parent.name in ("", "configs")
    return next((path for path in FOLDER.rglob("*.gin") if bare and path.name == named), None)


def is_packaged(path: str | Path) -> bool:
    """Whether a file is one of those that come with the package."""
    return Path(path).is_relative_to(FOLDER)


def is_part(path: str | Path) -> bool:
    """Whether a file is one of these, for others to include."""
    return is_packaged(path) and Path(path).parent.name == PARTS


def _stem(name: str) -> str:
    return Path(name).name.removesuffix(".gin")


def leading_comment(text: str) -> str:
    """The comment that a gin file begins with, without its marks, as one line."""
    comment = re.match(r"(#.*(\n|$))*", text)[0]
    return " ".join(line.lstrip("# ") for line in comment.splitlines()).strip()


def summary(text: str) -> str:
    """The first sentence that says what a config is, and its card, minutes and score."""
    head, _, about = re.sub(r"^# python .*\n", "", text).partition("\n#\n")
    first = re.split(r"(?<=\.)\s+(?=[A-Z])", leading_comment(about), maxsplit=1)[0]
    return f"{first} {leading_comment(head)}"


def _show(name: str, text: str) -> None:
    """Prints a name, and a text below it."""
    print(name)
    width = min(shutil.get_terminal_size().columns, 100)
    print(textwrap.fill(text, width, initial_indent="    ", subsequent_indent="    "))
