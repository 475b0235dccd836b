"""Scores a trained model on every target of a split: `reformax evaluate --output_dir=DIR`.

Prints bits per dim, of pieces per token and of a text per byte, and writes the same to
DIR/evaluation_SPLIT.json. The next evaluation of the split replaces it; DIR/evaluations.jsonl keeps
a line of each, whatever its length, stride and settings. A picture has the step and the length in
its name, and a checksum of other flags; the line has its name as `picture`. Of a task of classes it
prints bits per label.
The model and the task are those of the checkpoint's own config; settings such as the number of
hashes can be overridden with --config. A config that names other code than that of this package is
refused, unless --trust_config says that it may run.

A model of translation also translates the split, by beam search: sacreBLEU is printed with its
signature, DIR/translations_SPLIT.txt has the translations line for line, and
DIR/translations_SPLIT.tsv the source, the reference and the score of each. The next translation of
the split replaces both. --beam_size=0 leaves them out.

--by_position says whether far context helps: bits by the position in windows that do not overlap,
as a table, in the same file and in DIR/by_position_SPLIT_stepN_lengthN.png. Of rows of tables and
files of a folder, the table also has the position in a document that begins in its window.

--kept_mass says how much of dense attention's probability lies on the keys that hashes, or another
choice of keys, show: by layer, of a sample of queries. --n_hashes=2,4,8,16 scores the run with each
number of hashes besides its own, and names the fewest that suffice.

--tasks=ruler,hellaswag scores tasks by their names instead. `text` is the run's own split. The
package has RULER's kinds of tasks and two more, `needle`, `needles`, `multi_value`, `multi_query`,
`variables`, `common_words`, `recall` and `copy`, and `ruler` for all: see
`reformax.data.questions`. --lengths=4096,16384 gives their texts' lengths in tokens, and --texts a
file or folder in whose held-out text they hide sentences. A table and a picture have the accuracy
by length and depth: DIR/evaluation_tasks_stepN_lengthN.png, of the longest length. All other names
are lm-evaluation-harness's (pip install 'reformax[evals]'), which downloads their data.
DIR/evaluation_tasks.json has the figures of the newest evaluation of tasks. It is written after
each length of a task, whose row of the table is printed then; its `complete` says whether all are
there.

Exit code 0: all is printed and written. 1: an error; where DIR cannot be written the result is
printed all the same, and the last line of stderr names the file that is missing or old. 2: the
command, its config or its input is wrong.

Several processes score together as they train, by the same flags; one prints and writes. They do
not translate.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from reformax.cli import (
    compilation_cache,
    distributed,
    flags,
    hash_counts,
    parsed,
    report,
    results,
    saved_run,
    task_scores,
)
from reformax.declared import AnySeed, Count, PathName, SettingError, Size
from reformax.task import TaskModel

# The settings of the run that an evaluation reads besides those of its model.
READ = ("task", "loss_chunk_len", "eval_batch_size", "eval_length", "eval_stride")


def main(argv: Sequence[str] | None = None) -> int:
    """Flags, then gin, then one call."""
    args = parser().parse_args(argv)
    _check_search(args)
    if args.n_hashes is not None:
        hash_counts.counts_of(args.n_hashes)
    distributed.join(args)
    with contextlib.nullcontext() if distributed.first() else contextlib.redirect_stdout(None):
        if args.tasks is None:
            flags.refuse(args, task_scores.OF_TASKS, "only --tasks reads it")
            return _evaluate(args)
        return task_scores.score(args, lambda: _evaluate(args))


def _evaluate(args) -> int:
    """Scores what the flags say, prints and writes."""
    args.split = args.split or "valid"
    files = results.ResultFiles(args.output_dir, writes=distributed.first())
    compilation_cache.use()
    saved = saved_run.restore(args, args.data_dir)
    distributed.agree("the checkpoint", lambda: saved_run.identities(saved.folder, saved.steps))
    from reformax.training import loop
    from reformax.training.evaluation import evaluate, padding_note, work_in_words

    run = parsed.bindings(loop.train, READ)
    task = run["task"]
    if task.translation is None:
        flags.refuse(args, flags.SEARCH, f"the task {task.name} is no translation")
    else:
        reason = f"the task {task.name} is a translation, whose rows are sentences"
        flags.refuse(args, {"by_position"}, reason)
        if distributed.joined() and args.beam_size != 0:
            raise SettingError(
                f"the task {task.name} is a translation, and several processes do not translate: "
                "give --beam_size=0, or evaluate in one process"
            )
    _check_hashes(args, saved.model)
    if task.labels is not None:
        flags.refuse(args, {"by_position"}, f"the task {task.name} has one target a row, its class")
    vocabulary = task.kept_vocabulary
    if vocabulary is not None:
        saved_run.keep_vocabulary(vocabulary, saved)
    changed = saved_run.changed_data(args, task, saved)
    options = {"seed": args.seed, "loss_chunk_len": run.get("loss_chunk_len")}
    options |= {"progress": not args.quiet and distributed.first(), "mesh": saved.mesh}
    sizes = _sizes(args, run | saved.run)
    options["max_tokens"] = args.tokens

    if note := padding_note(task, args.split, sizes["batch_size"], sizes["length"], "--"):
        print(f"note: {note}", flush=True)
    work = work_in_words(task, args.split, sizes["length"], sizes["stride"], args.tokens)
    if work and options["progress"]:
        print(work, file=sys.stderr, flush=True)

    def score(model: TaskModel) -> dict[str, Any]:
        return evaluate(model, saved.params, task, args.split, **sizes, **options)

    result = score(saved.model)
    _check_finite(result, saved)
    report.note_unused(args.config, (*saved_run.MODEL, *READ))
    result |= {"checkpoint_steps": saved.steps, "seed": args.seed, "overrides": args.config}
    if changed:
        result["changed_data"] = changed
    name = f"evaluation_{args.split}.json"
    files.write_result(name, result)  # it is kept if the search fails
    _print(result, files.named(name), task)
    if args.kept_mass or args.n_hashes:
        result |= _hashes(args, saved, task, sizes, score)
        files.write_result(name, result)
    if args.by_position:
        result |= _by_position(args, saved, task, files, sizes, options)
        files.write_result(name, result)
    if task.translation is not None and args.beam_size != 0:
        scores = _translate(args, saved, task.translation, files)
        files.write_result(name, result | scores)
        _print_translation(scores)
    return files.exit_code()


def parser():
    """The flags."""
    parser = flags.parser(__doc__)
    flags.add_run(parser)
    parser.add_argument("--split", choices=["train", "valid", "test"], help="default: valid")
    parser.add_argument(
        "--length", type=flags.of(Size), help="context in tokens (default: the run's)"
    )
    parser.add_argument(
        "--stride",
        type=flags.of(Size),
        help="tokens the context moves by: each window predicts its last STRIDE, so a smaller one "
        "gives every prediction more context and costs more (default: the run's, or the length)",
    )
    parser.add_argument(
        "--by_position",
        action="store_true",
        default=None,
        help="also score windows of the length that do not overlap, by the position in them: a "
        "table and DIR/by_position_SPLIT_stepN_lengthN.png",
    )
    parser.add_argument(
        "--kept_mass",
        action="store_true",
        default=None,
        help="also print the share of dense attention's mass on the keys that attention sees",
    )
    parser.add_argument(
        "--n_hashes",
        metavar="COUNTS",
        help="also score with each of these numbers of hashes, such as 2,4,8,16",
    )
    parser.add_argument(
        "--batch_size", type=flags.of(Size), help="windows at a time (default: the run's)"
    )
    parser.add_argument(
        "--tokens",
        type=flags.of(Size),
        help="score about so many targets, evenly spread over the split (default: every one)",
    )
    parser.add_argument("--seed", type=flags.of(AnySeed), default=0, help="of the hashes")
    parser.add_argument("--data_dir", type=flags.of(PathName), help="where the task finds its data")
    flags.add_changed_data(parser)
    _add_tasks(parser)
    flags.add_search(parser)
    distributed.add_flags(parser)
    flags.add_quiet(parser)
    flags.add_traceback(parser)
    return parser


def _add_tasks(parser) -> None:
    tasks = parser.add_argument_group("tasks")
    tasks.add_argument("--tasks", metavar="NAMES", help="names with commas between them")
    tasks.add_argument(
        "--include_path", type=flags.of(PathName), help="a folder of the harness's tasks as YAML"
    )
    tasks.add_argument(
        "--num_fewshot", type=flags.of(Count), help="examples before each question of the harness"
    )
    tasks.add_argument(
        "--limit",
        type=flags.of(Size),
        help="questions of each task (default: all; of the package's tasks 50 of each length)",
    )
    tasks.add_argument(
        "--lengths",
        metavar="TOKENS",
        help="of the package's tasks, with commas between them (default: --length)",
    )
    tasks.add_argument(
        "--depths", type=flags.of(Size), help="parts of a text that accuracies are of (default: 5)"
    )
    tasks.add_argument(
        "--texts",
        type=flags.of(PathName),
        help="a file or folder whose test split needles lie in (default: sentences that repeat)",
    )


def _check_search(args) -> None:
    """Refuses flags of the search that are out of range, before the model is built."""
    from reformax.generation.translation import check_options

    if args.beam_size == 0:
        others = flags.SEARCH.keys() - {"beam_size"}
        flags.refuse(args, others, "with --beam_size=0 nothing is translated")
    else:
        check_options(**flags.search_options(args))


def _sizes(args, run: dict[str, Any]) -> dict[str, int]:
    """The sizes of the evaluation: the flags', or the run's."""
    from reformax.training.evaluations import sizes_of

    of_training = dict(batch_size=run["batch_size"], length=run["length"], stride=run["length"])
    given = (run.get(f"eval_{name}") for name in ("batch_size", "length", "stride"))
    return sizes_of(args.batch_size, args.length, args.stride, sizes_of(*given, of_training))


def _check_finite(result: dict[str, Any], saved: saved_run.Saved) -> None:
    """Raises `FloatingPointError` for a result that is no score."""
    for name, value in result.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise FloatingPointError(
                f"{name} of {result['split']} is {value} for the {saved_run.named(saved.steps)}: "
                "nothing is written; evaluate an earlier one, or with float32 as its dtype"
            )


def _check_hashes(args, model: TaskModel) -> None:
    """Refuses flags of hashes for a model that has none, before it is scored."""
    from reformax.training import kept_mass

    if args.n_hashes is not None:
        hash_counts.with_n_hashes(model, hash_counts.counts_of(args.n_hashes)[0])
    if args.kept_mass:
        kept_mass.check_model(model, "--kept_mass")


def _hashes(
    args,
    saved: saved_run.Saved,
    task,
    sizes: dict[str, int],
    score: Callable[[TaskModel], dict[str, Any]],
) -> dict[str, Any]:
    """Prints what attention keeps of dense attention's mass, and scores by the number of hashes."""
    from reformax.training import kept_mass
    from reformax.training.loss import metric_name

    options = {name: sizes[name] for name in ("batch_size", "length")}
    options |= dict(seed=args.seed, mesh=saved.mesh)

    def measure(model: TaskModel) -> dict[str, float]:
        return kept_mass.of_split(model, saved.params, task, args.split, **options)

    found = {}
    if args.kept_mass:
        found = measure(saved.model)
        print(kept_mass.words(found), flush=True)
    if args.n_hashes is not None:
        counts, metric = hash_counts.counts_of(args.n_hashes), metric_name(task)
        found |= hash_counts.score(saved.model, counts, metric, score, measure)
        print(hash_counts.table(found, metric), flush=True)
    return found


def _by_position(
    args, saved: saved_run.Saved, task, files, sizes: dict[str, int], options: dict[str, Any]
) -> dict[str, Any]:
    """Prints and draws the bits by position."""
    from reformax.training import by_position
    from reformax.training.loss import metric_name

    arguments = {name: x for name, x in (sizes | options).items() if name != "stride"}
    bands = by_position.by_position(saved.model, saved.params, task, args.split, **arguments)
    metric = metric_name(task)
    others = dict(seed=args.seed, config=args.config, tokens=args.tokens, data_dir=args.data_dir)
    stem = f"by_position_{args.split}"
    name = results.picture_name(stem, saved.steps, sizes["length"], **others)
    title = f"{args.split}, windows of {sizes['length']:,}, {saved_run.named(saved.steps)}"
    files.write(name, by_position.draw(bands, metric, title))
    print(f"{by_position.table(bands, metric)}\n{files.named(name)}", flush=True)
    return by_position.as_json(bands, metric) | {"picture": name}


def _translate(args, saved: saved_run.Saved, translation, files) -> dict[str, Any]:
    """Translates the split into files and scores it."""
    from reformax.cli import translations

    options = flags.search_options(args)
    scores = translations.score_split(
        saved.model,
        saved.params,
        translation,
        args.split,
        files.write_text,
        **options,
        hash_seed=args.seed,
        progress=not args.quiet,
        mesh=saved.mesh,
    )
    return scores | options


def _print(result: dict[str, Any], where: str, task) -> None:
    from reformax.training.loss import metric_name
    from reformax.training.metrics import METRICS

    document = " of its own document" if task.document_mask else ""
    sizes = f"in windows of {result['length']} (stride {result['stride']})"
    context = f"the tokens before it{document} {sizes}"
    if task.translation is not None:
        context = "its source and the tokens before it"
    if task.labels is not None:
        context = f"a row of at most {result['length']} tokens"
    part = "" if result["whole"] else f" of {task.n_targets(result['split']):,}, evenly spread"
    print(
        f"{result['split']}: {result['n_targets']:,} targets{part}, each predicted once from "
        f"{context}, {saved_run.named(result['checkpoint_steps'])}, {where}"
    )
    if (error := result.get("standard_error")) is not None:
        rows = "windows" if task.labels is None else "rows"
        print(f"{rows}: {result['n_windows']:,}, standard error of their mean {error:.4f} bits")
    for name in (name for name in METRICS if name in result):
        print(f"{name}: {result[name]:.4f}")
    metric = metric_name(task)
    of_bytes = metric == "bits_per_dim" and "bits_per_byte" in result  # the same number
    for name in [metric] if of_bytes else [metric, "bits_per_byte"]:
        if name in result:
            unit = " (bits per byte)" if of_bytes else ""
            print(f"{name}: {result[name]:.4f}{unit}", flush=True)


def _print_translation(scores: dict[str, Any]) -> None:
    for name in ("bleu", "bleu_uncased"):
        print(f"{name}: {scores[name]:.2f} ({scores[f'{name}_signature']})")
    print(f"exact: {scores['exact']:.4f} of {scores['n_sentences']:,} sentences", flush=True)
