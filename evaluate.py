"""Scores a trained model on every target of a split: `python evaluate.py --output_dir=DIR`.

Prints bits per dim (of a translation: per token) and writes the same to DIR/evaluation_SPLIT.json.
The model and the task are those of DIR/config.gin; settings such as the number of hashes can be
overridden with --config.

A model of translation also translates the split, by beam search: sacreBLEU is printed with its
signature, DIR/translations_SPLIT.txt has the translations line for line, and
DIR/translations_SPLIT.tsv the source, the reference and the score of each. --beam_size=0 leaves
that out.
"""

import json
import sys
from pathlib import Path
from typing import Any

from reformax.cli import config, errors, flags, report, saved_run

# The settings of the run that an evaluation reads.
READ = (
    *saved_run.MODEL,
    "task",
    "loss_chunk_len",
    "eval_batch_size",
    "eval_length",
    "eval_stride",
)


def main() -> int:
    """Flags, then gin, then one call."""
    args = _parser().parse_args()
    saved_run.parse(args, args.data_dir)
    from reformax.training import loop
    from reformax.training.evaluation import evaluate

    _check_search(args)
    run = config.bindings(loop.train, READ)
    model, params, steps = saved_run.restore_model(args, run)
    task = run["task"]
    if task.translation is None:
        flags.refuse(args, flags.SEARCH, f"the task {task.name} is no translation")
    else:
        saved_run.keep_vocabulary(args, task.translation.vocabulary, steps[-1])
    changed = saved_run.changed_data(args, task, steps[-1])
    options = {"seed": args.seed, "loss_chunk_len": run.get("loss_chunk_len"), "progress": True}
    result = evaluate(model, params, task, args.split, **_sizes(args, run), **options)
    report.note_unused(args.config, READ)
    result |= {"checkpoint_steps": steps, "seed": args.seed, "overrides": args.config}
    if changed:
        result["changed_data"] = changed
    path = Path(args.output_dir) / f"evaluation_{args.split}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")  # it is kept if the search fails
    if task.translation is not None and args.beam_size != 0:
        result |= _translate(args, model, params, task.translation)
        path.write_text(json.dumps(result, indent=1) + "\n")
    _print(result, path, task)
    return 0


def _parser():
    parser = flags.parser(__doc__)
    flags.add_run(parser)
    parser.add_argument("--split", default="valid", choices=["train", "valid", "test"])
    parser.add_argument("--length", type=int, help="context in tokens (default: the run's)")
    parser.add_argument(
        "--stride",
        type=int,
        help="tokens the context moves by: each window predicts its last STRIDE, so a smaller one "
        "gives every prediction more context and costs more (default: the run's, or the length)",
    )
    parser.add_argument("--batch_size", type=int, help="windows at a time (default: the run's)")
    parser.add_argument("--seed", type=int, default=0, help="of the hashes")
    parser.add_argument("--data_dir", help="where the task finds its data")
    flags.add_changed_data(parser)
    flags.add_search(parser)
    flags.add_traceback(parser)
    return parser


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
    length = args.length or run.get("eval_length") or run["length"]
    # The run's stride belongs to the run's length.
    stride = args.stride or (None if args.length else run.get("eval_stride")) or length
    batch_size = args.batch_size or run.get("eval_batch_size") or run["batch_size"]
    return {"batch_size": batch_size, "length": length, "stride": stride}


def _translate(args, model, params, translation) -> dict[str, Any]:
    """Translates the split into files and scores it."""
    from reformax.cli import translations

    options = flags.search_options(args)
    scores = translations.score_split(
        model, params, translation, args.split, args.output_dir, **options, hash_seed=args.seed
    )
    return scores | options


def _print(result: dict[str, Any], path: Path, task) -> None:
    from reformax.training.loss import metric_name

    context = f"at most {result['length']} tokens (stride {result['stride']})"
    if task.translation is not None:
        context = "its source and the tokens before it"
    print(
        f"{result['split']}: {result['n_targets']:,} targets, each predicted once from {context}, "
        f"{saved_run.named(result['checkpoint_steps'])}, in {path}"
    )
    print(f"accuracy: {result['accuracy']:.4f}")
    metric = metric_name(task)
    print(f"{metric}: {result[metric]:.4f}")
    if "bleu" in result:
        for name in ("bleu", "bleu_uncased"):
            print(f"{name}: {result[name]:.2f} ({result[f'{name}_signature']})")
        print(f"exact: {result['exact']:.4f} of {result['n_sentences']:,} sentences")


if __name__ == "__main__":
    sys.exit(errors.exit_code(main))
