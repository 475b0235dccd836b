"""What each attention learns of a task of Long Range Arena, all with the same model and training.

    python -m benchmarks.long_range_arena --task=listops --steps=3000 --saved=FILE
    python -m benchmarks.long_range_arena --task=pathfinder --only exact recurrent --gpus=2

trains the encoder of long_range_arena.gin, made smaller (SIZES), on the examples of the
task's own config, and prints the share of the valid split's rows that is named right at the end,
the bits of a label by the best checkpoint, and tokens/s, the median over the steps. Tay et al.
2020, "Long Range Arena", has the tasks. Positions are the config's: Pathfinder turns queries
and keys by row and column, all else adds sinusoids. Pathfinder's config brings longer and longer
curves.

The class is read from the mean over a row, or with --pooling=cls from one vector: a learnt one
before the row, as in the published models of texts, and of rows that are read causally the last
token's.

Rows are in groups: `exact` attention, `hashed` and otherwise `chosen` keys, fixed `patterns`, a
`low_rank`, `recurrent` states of constant size, and `configured`, what a task's config has for it
alone. They see 256 keys or so where they have such a number. What cannot show the future reads rows
causally.

--curriculum first trains on shorter lists, and then on longer ones: two thirds of the steps each,
with as many tokens. --pretrained first trains a masked language model on the same rows
for as many steps, as Amos et al. 2023, "Never Train from Scratch", do, and begins the classifier
with its weights. Rows that cannot show the future are left out then. Linformer is left out where
lengths differ, for its weights are of one.

Each row is a process of its own. --at_once=3 has three on a GPU: they compile and evaluate side by
side and train in turn, so that tokens/s are of one alone. --gpus=2 spreads them over two. With
--limit no row goes on after so many seconds. --saved=FILE adds each row to a file as soon as it is
known, and a row that is there for as many steps of the task is not trained again. --runs=FOLDER
keeps the run of each row there, as listops_3000_mean/flash, and goes on with it, also with one that
the limit ended; what a task draws is kept there too.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.harness import campaign, command_line
from benchmarks.harness.calls import exit_if
from benchmarks.harness.output import Table
from benchmarks.harness.processes import Answer
from reformax.shell import user_path


class Task(NamedTuple):
    """A task's config has its name."""

    factory: str
    vocab_size: int
    drawn: bool = False  # what it draws can be kept in a folder
    easier: Sequence[Sequence[str]] = ()  # settings of what a curriculum begins with, in its order
    learning_rate: float = 1e-3
    warmup: float = 0.1  # a share of the steps
    own: bool = False  # whether its config has an attention for it alone


def _lists(shortest: int, longest: int, rows: int) -> list[str]:
    """Lists between two lengths in tokens, so many a step."""
    bounds = f"min_length={shortest}", f"max_length={longest + 1}"
    return [*(f"listops.listops.{x}" for x in bounds), f"length={longest}", f"batch_size={rows}"]


PATHFINDER = Task(
    "pathfinder.pathfinder",
    257,
    drawn=True,
    learning_rate=3e-4,
    warmup=0.04,  # well within the first of its stages
    own=True,
)
TASKS = {
    "listops": Task("listops.listops", 16, True, (_lists(10, 128, 512), _lists(100, 512, 128))),
    "listops_short": Task("listops.listops", 16, True, (_lists(5, 32, 128),)),
    "pathfinder": PATHFINDER,
    "path_x": PATHFINDER,
    "stdlib_packages": Task("stdlib_packages.stdlib_packages", 257),
    "reviews": Task("reviews.reviews", 257),
    "document_pairs": Task("document_pairs.document_pairs", 257),
    "cifar10": Task("cifar10.cifar10", 257),
}
SIZES = ["d_model=128", "d_ff=512", "d_head=32", "dropout=0.0"]
CAUSAL = "encoder.{model}.causal=True"


def _row(op: str, *settings: str) -> list[str]:
    """The settings of a row: an op, and its own."""
    return [f"attention=@{op}.{op}()", *(f"{op}.{op}.{setting}" for setting in settings)]


OWN = "the config's own"
GROUPS = {
    "exact": {
        "flash": _row("flash"),
        "flash, causal": [*_row("flash"), CAUSAL],
        "shared_qk": _row("shared_qk"),
    },
    "hashed": {
        "lsh": _row("lsh", "n_chunks_after=1"),
        "smyrf": _row("smyrf"),
        "asymmetric_lsh": _row("asymmetric_lsh"),
        "hash_sparse": _row("hash_sparse", "n_buckets=8"),
    },
    "chosen": {
        "routing": _row("routing", "n_clusters=8", "decay=0.99"),
        "dsa": _row("dsa", "top_k=256", "n_index_heads=2"),
        "moba": [*_row("moba", "block_size=64", "top_k=4"), CAUSAL],
        "nsa": [*_row("nsa", "n_selected=4", "window=128"), CAUSAL],
    },
    "patterns": {
        "local": _row("local", "n_chunks_after=1"),
        "longformer, first token global": [
            *_row("longformer", "window=256", "n_global=1"),
            "encoder.{model}.n_global=1",
        ],
        "bigbird": _row("block_sparse", "block_size=64", "pattern=@block_patterns.bigbird()"),
        "block_sparse, butterfly": _row("block_sparse", "block_size=32"),
        "sinks": _row("sinks", "window=256"),
    },
    "low_rank": {
        "linformer": _row("linformer"),
        "nystromformer": _row("nystromformer"),
        "performer": _row("performer", "n_features=128"),
        "long_short": _row("long_short"),
    },
    "recurrent": {
        "linear": _row("linear"),
        "retention": [*_row("retention"), CAUSAL],
        "gated_linear": [*_row("gated_linear", "conv_size=4"), CAUSAL],
        "gated_delta": [*_row("gated_delta", "conv_size=4"), CAUSAL],
    },
    "configured": {OWN: []},
}
ROWS = {name: settings for rows in GROUPS.values() for name, settings in rows.items()}
TINY = [
    *("batch_size=2", "d_model=16", "d_ff=16", "n_layers=2", "n_heads=2", "d_head=8"),
    *("loop.train.eval_batch_size=2", "loop.train.eval_tokens=128", "loop.train.log_every=1"),
]
TINY_IMAGES = [
    "n_heads=4",
    "n_layers=4",
    "pathfinder.pathfinder.n_train=8",
    "pathfinder.pathfinder.n_eval=8",
]


def _for(steps: int, warmup: float) -> list[str]:
    """The settings of a run of so many steps, of which a share is warm-up."""
    warmup_steps = max(1, int(warmup * steps))
    return [f"steps={steps}", f"warmup_steps={warmup_steps}", f"loop.train.eval_every={steps}"]


def parts_of(name: str, args: argparse.Namespace) -> list[campaign.Part]:
    """The runs of a row: the masked model's, those of easier examples, and the classifier's."""
    file, task = f"{args.task}.gin", TASKS[args.task]
    given = [*SIZES, *([] if args.tiny else ["dtype='bfloat16'"])]
    pooling = "last" if args.pooling == "cls" and CAUSAL in ROWS[name] else args.pooling
    given += [
        *_for(args.steps, task.warmup),
        f"learning_rate={task.learning_rate}",
        "loop.train.checkpoint_minutes=None",
    ]
    if task.drawn and args.runs:
        given.append(f"{task.factory}.cache_dir={str(args.runs.absolute() / 'drawn')!r}")

    def of(model: str) -> list[str]:
        return [*given, *(setting.format(model=model) for setting in ROWS[name])]

    runs = []
    if args.pretrained:
        given.append(f"vocab_size={task.vocab_size + 1}")  # with [MASK]
        masked = ["loop.train.model=@encoder.TransformerMaskedLM"]
        masked += ["loop.train.task=@masked.masked()", "masked.masked.length=%length"]
        masked += [f"masked.masked.task=@{task.factory}()", "loop.train.stages=()"]
        runs = [[*of("TransformerMaskedLM"), *masked]]
    classes = [*of("TransformerEncoder"), f"encoder.TransformerEncoder.pooling={pooling!r}"]
    if args.curriculum:
        sized = _for(max(2, args.steps * 2 // 3), task.warmup)
        runs += [[*classes, *settings, *sized] for settings in task.easier]
    runs.append(classes)
    if args.pretrained:
        runs[1] = [*runs[1], "loop.train.fresh_heads=True"]
    tiny = [*TINY, *(TINY_IMAGES if task == PATHFINDER else [])]
    return [(file, [*settings, *(tiny if args.tiny else [])]) for settings in runs]


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--task", choices=TASKS, default="listops", help="default: listops")
    text = "the data of a task that is not drawn"
    parser.add_argument("--data_dir", type=functools.partial(user_path, "data_dir"), help=text)
    parser.add_argument("--steps", type=command_line.positive, default=3000, help="default: 3000")
    text = "where the class is read (default: mean)"
    parser.add_argument("--pooling", choices=("mean", "cls"), default="mean", help=text)
    text = "first shorter lists"
    parser.add_argument("--curriculum", action="store_true", help=text)
    text = "rows that show the future: first a masked language model of the same rows"
    parser.add_argument("--pretrained", action="store_true", help=text)
    campaign.flags(parser, GROUPS)
    args = parser.parse_args(argv)
    if args.tiny:
        args.steps = 2

    if args.curriculum and not TASKS[args.task].easier:
        found = [name for name, task in TASKS.items() if task.easier]
        parser.error(f"--curriculum with --task={args.task}: expected one of {', '.join(found)}")
    names = "task", "steps", "pretrained", "curriculum", "tiny", "pooling"
    run = {name: getattr(args, name) for name in names}
    table = Table("attention", "right", "bits of a label", "rows", "tokens/s")
    failed = []
    rows = campaign.chosen(args, GROUPS)
    if not TASKS[args.task].own:
        rows = [name for name in rows if name != OWN]
    if args.pretrained:
        rows = [name for name in rows if CAUSAL not in ROWS[name]]
    easier = TASKS[args.task].easier if args.curriculum else ()
    longer = any(setting.startswith("length=") for settings in easier for setting in settings)
    if longer or (args.pretrained and args.pooling == "cls"):
        rows = [name for name in rows if name != "linformer"]
    for name, known in campaign.trained(rows, lambda name: parts_of(name, args), run, args):
        table.result(name, known=known, cells=_cells)
        failed += [name] * isinstance(known, Exception)
    exit_if(failed)


def _cells(trained: Answer) -> list[str]:
    right, speed = trained["accuracy"], trained["tokens_per_second"]
    return [f"{right:.1%}", f"{trained['bits']:.3f}", f"{trained['n_targets']:,}", f"{speed:,.0f}"]


if __name__ == "__main__":
    main()
