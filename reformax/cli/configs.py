"""Lists the configs that come with reformax, or prints one: `reformax configs [NAME]`.

`reformax train --config_file=NAME` finds them by these names, wherever it is started. A config of
the same name in the working directory goes first. A config of your own may include them:
`include 'reformer.gin'`.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path

from reformax.cli import flags, messages
from reformax.declared import SettingError

FOLDER = Path(__file__).resolve().parents[1] / "configs"
# Where a config is looked for that is not in the working directory: as NAME, as configs/NAME.
FOLDERS = (FOLDER, FOLDER.parent)


def main(argv: Sequence[str] | None = None) -> int:
    """Lists the configs or prints one."""
    args = parser().parse_args(argv)
    if args.name is not None:
        print(find(args.name).read_text(), end="")
        return 0
    texts = {path.name: path.read_text() for path in sorted(FOLDER.glob("*.gin"))}
    parts = [name for name, text in texts.items() if "to be included" in leading_comment(text)]
    for name in sorted(texts.keys() - parts):
        _show(name, summary(texts[name]))
    _show("parts, to be included", ", ".join(parts))
    return 0


def parser():
    """The flags."""
    parser = flags.parser(__doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this one")
    flags.add_traceback(parser)
    return parser


def find(name: str) -> Path:
    """The path of a packaged config, by its name, with or without .gin.

    Raises:
      SettingError: there is none of this name.
    """
    names = [path.name for path in sorted(FOLDER.glob("*.gin"))]
    wanted = f"{name.removeprefix('configs/').removesuffix('.gin')}.gin"
    if wanted not in names:
        raise SettingError(f"no config {name}{messages.nearest(wanted, names)}")
    return FOLDER / wanted


def leading_comment(text: str) -> str:
    """The comment that a gin file begins with, without its marks, as one line."""
    comment = re.match(r"(#.*\n)*", text)[0]
    return " ".join(line.lstrip("# ") for line in comment.splitlines()).strip()


def summary(text: str) -> str:
    """The first sentence of a gin file's comment, without the command before it."""
    comment = re.sub(r"^# python .*\n(#\n)*", "", text)
    return re.split(r"(?<=\.)\s+(?=[A-Z])", leading_comment(comment), maxsplit=1)[0]


def _show(name: str, text: str) -> None:
    """Prints a name, and a text below it."""
    print(name)
    width = min(shutil.get_terminal_size().columns, 100)
    print(textwrap.fill(text, width, initial_indent="    ", subsequent_indent="    "))
