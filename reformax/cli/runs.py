"""Compares runs: `reformax runs DIR...` prints a table and draws their curves.

A DIR is a run's folder, or one that holds runs, such as a sweep's. The table has the settings in
which the runs differ, the best score with its step, tokens/s (the median of the record) and the
minutes of training. A setting of a function that some runs do not use, such as the hashes of LSH
attention, is compared among those that do. Of many settings the table has as many as the terminal
is wide for, those that most runs have first; --all shows all, and so does a file. The plot has the
scores of each run over its smoothed training loss.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reformax import durable
from reformax.cli import flags, report, statements
from reformax.data.files import PLOT
from reformax.declared import PathName, SettingError
from reformax.training import curves, record_lines
from reformax.training.folder import OF_WORDS

LONGEST = 40  # letters of a setting in the table
LEAST_SHOWN = 3  # settings that the narrowest terminal shows
ABSENT = "-"
METRICS = ("bits_per_dim", "bits_per_token", "bits_per_label")


class RecordedRun(NamedTuple):
    """The name, the settings and the record of a run's folder."""

    name: str
    settings: dict[str, str]  # as config.gin has them
    metric: str
    lines: list[dict[str, Any]]

    @property
    def unit(self) -> str:
        """The metric in words, of bytes by both of its names."""
        return curves.words_of(self.metric, next((x for x in self.lines if self.metric in x), {}))

    @property
    def scores(self) -> dict[str, curves.Curve]:
        """The evaluations, by what they scored."""
        return curves.scores(self.lines, self.metric)


def main(argv: Sequence[str] | None = None) -> int:
    """Flags, the table, the plot."""
    args = parser().parse_args(argv)
    runs = read(args.folders)
    for line in table(runs, None if args.all else report.width()):
        print(line)
    path = Path(args.plot or _parent(args.folders) / PLOT)
    try:
        durable.write(path, draw(runs, args.x))
    except OSError as error:
        raise OSError(f"{error}; --plot=FILE draws the curves elsewhere") from None
    print(f"\ncurves: {path}")
    return 0


def parser() -> flags.Parser:
    """The flags."""
    parser = flags.parser(__doc__)
    parser.add_argument("folders", nargs="+", metavar="DIR", type=flags.of(PathName))
    parser.add_argument(
        "--plot",
        type=flags.of(PathName),
        metavar="FILE",
        help="where to draw the curves (default: runs.png, next to the runs)",
    )
    parser.add_argument(
        "--x", choices=["step", "minutes"], default="step", help="what the curves go by"
    )
    parser.add_argument(
        "--all", action="store_true", help="show every setting that differs, however wide"
    )
    flags.add_traceback(parser)
    return parser


def read(folders: Sequence[str]) -> list[RecordedRun]:
    """The runs in these folders, and in the folders in them.

    Raises:
      SettingError: a folder has none.
    """
    found: dict[Path, None] = {}
    for folder in map(Path, folders):
        paths = [folder] if _is_run(folder) else sorted(filter(_is_run, folder.glob("*")))
        if not paths:
            raise SettingError(
                f"{folder} has no metrics.jsonl, nor has a folder in it: give the folders that "
                "`reformax train` wrote"
            )
        found |= dict.fromkeys(path.resolve() for path in paths)
    return [_read(path, name) for path, name in zip(found, _names(list(found)), strict=True)]


def _is_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file()


def _read(folder: Path, name: str) -> RecordedRun:
    lines = record_lines.read(folder / "metrics.jsonl")
    metric = next((m for m in METRICS if any(m in line for line in lines)), METRICS[0])
    path = folder / "config.gin"
    text = path.read_text(errors="replace") if path.is_file() else ""
    values = statements.read(text, str(path)).values
    return RecordedRun(name, {name: repr(value) for name, value in values.items()}, metric, lines)


def _names(paths: list[Path]) -> list[str]:
    """The folders' names, with as many parent folders as make them unique."""
    parts = [path.parts for path in paths]
    n = next(n for n in itertools.count(1) if len({x[-n:] for x in parts}) == len(parts))
    return ["/".join(x[-n:]) for x in parts]


def _parent(folders: Sequence[str]) -> Path:
    first = Path(folders[0])
    return first.parent if _is_run(first) else first


def table(runs: Sequence[RecordedRun], width: int | None = None) -> list[str]:
    """The lines of a Markdown table, a row for each run, and of what a `width` has no room for."""
    settings = differences([run.settings for run in runs])
    best: dict[str, list[str]] = {}
    for i, run in enumerate(runs):
        for scored, curve in run.scores.items():
            cells = best.setdefault(f"best {run.unit} of {scored}", [ABSENT] * len(runs))
            at = curve.values.argmin()
            cells[i] = f"{curve.values[at]:.4f} at {curve.steps[at]:,}"
    figures = best | {
        "steps done": [f"{max((x['step'] for x in run.lines), default=0):,}" for run in runs],
        "tokens/s": [_speed(run) for run in runs],
        "minutes": [f"{curves.seconds(run.lines).values[-1] / 60:.1f}" for run in runs],
    }
    names = {"run": [run.name for run in runs]}
    shown = settings
    if width is not None:
        room = width - 1 - sum(_width(*column) for column in (names | figures).items())
        shown = _fitting(settings, room)
    lines = _lines(names | shown, figures)
    if left_out := len(settings) - len(shown):
        more = "1 more setting differs" if left_out == 1 else f"{left_out:,} more settings differ"
        lines += ["", f"{more}: --all of `reformax runs` shows all"]
    return lines


def _lines(words: dict[str, list[str]], figures: dict[str, list[str]]) -> list[str]:
    """Columns as a Markdown table, the figures on the right."""
    columns = []
    for name, cells in (words | figures).items():
        size = max(map(len, [name, *cells]))
        if name in words:
            columns.append([name.ljust(size), "-" * size, *(x.ljust(size) for x in cells)])
        else:
            rule = "-" * (size - 1) + ":"
            columns.append([name.rjust(size), rule, *(x.rjust(size) for x in cells)])
    return [f"| {' | '.join(row)} |" for row in zip(*columns, strict=True)]


def _width(name: str, cells: Sequence[str]) -> int:
    """The letters of a column, with its border."""
    return max(map(len, [name, *cells])) + 3


def _fitting(settings: dict[str, list[str]], room: int) -> dict[str, list[str]]:
    """The settings that `room` has letters for, `LEAST_SHOWN` at least, in their order."""
    chosen = set()
    for name, cells in sorted(settings.items(), key=lambda column: column[1].count(ABSENT)):
        room -= _width(name, cells)
        if room < 0 and len(chosen) >= LEAST_SHOWN:
            break
        chosen.add(name)
    return {name: cells for name, cells in settings.items() if name in chosen}


def _speed(run: RecordedRun) -> str:
    speeds = [x.get("timing", {}).get("tokens_per_second") for x in run.lines]
    speeds = [speed for speed in speeds if speed is not None]
    return f"{statistics.median(speeds):,.0f}" if speeds else ABSENT


def differences(settings: Sequence[dict[str, str]]) -> dict[str, list[str]]:
    """The settings that differ, by their shortest unique names: a value of each run."""
    functions = [{name.rpartition(".")[0] for name in one} for one in settings]
    found = {}
    for name in dict.fromkeys(name for one in settings for name in one):
        function = name.rpartition(".")[0]
        if len({one.get(name) for one in settings}) == 1:
            continue  # the same, or the same macro, which is a setting itself
        values = [one.get(one.get(name, name)[1:], one.get(name)) for one in settings]
        comparable = {v for v, used in zip(values, functions, strict=True) if function in used}
        if len(comparable) > 1 and name not in OF_WORDS:
            found[name] = values
    names = [name for name in found if not _is_shown(name, found, settings)]
    columns = ([ABSENT if value is None else _cut(value) for value in found[x]] for x in names)
    return dict(zip(short_names(names), columns, strict=True))


def _is_shown(
    macro: str, found: dict[str, list[str | None]], settings: Sequence[dict[str, str]]
) -> bool:
    """Whether a setting that is this macro in some run has a column with all that it says."""
    uses = {name for one in settings for name, value in one.items() if value == f"%{macro}"}
    return any(
        all(value in (None, used) for value, used in zip(found[macro], found[use], strict=True))
        for use in uses & found.keys()
    )


def short_names(names: Sequence[str]) -> list[str]:
    """The last parts of each name, as many as make it unique."""
    parts = [name.split(".") for name in names]
    found = []
    for one in parts:
        ends = (one[-n:] for n in range(1, len(one) + 1))
        end = next((e for e in ends if sum(x[-len(e) :] == e for x in parts) == 1), one)
        found.append(".".join(end))
    return found


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def draw(runs: Sequence[RecordedRun], x: str) -> bytes:
    """A PNG of the runs' curves by 'step' or by 'minutes'."""
    figure, axes = curves.new_figure((8, 5))
    shown = []
    for n, run in enumerate(runs):
        color = f"C{n % 10}"
        time = curves.seconds(run.lines)
        by_x = [_by(x, curve, time) for curve in run.scores.values()]
        train = _by(x, curves.losses(run.lines, run.metric), time)
        smoothed = curves.Curve(train.steps, curves.smooth(train.values))
        axes.plot(*smoothed, lw=1, alpha=0.5 if by_x else 1, color=color)
        for curve in by_x:
            axes.plot(*curve, "osD^v"[n // 10 % 5] + "-", ms=4, color=color)
        axes.plot([], [], color=color, label=run.name, marker="osD^v"[n // 10 % 5], ms=4)
        shown += [smoothed, *by_x]
    names = {run.unit for run in runs}
    axes.set(xlabel=x, ylabel=" or ".join(sorted(names)))
    axes.set_title("scores with markers, smoothed training loss without", fontsize=9)
    curves.finish(axes, shown)
    if len(runs) > 8:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    return curves.png(figure)


def _by(x: str, curve: curves.Curve, time: curves.Curve) -> curves.Curve:
    return curve if x == "step" else curves.by_minutes(curve, time)
