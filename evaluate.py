"""Scores a trained model on every target of a split: `python evaluate.py --output_dir=DIR`.

Prints bits per dim (of a translation: per token) and writes the same to DIR/evaluation_SPLIT.json.
The model and the task are those of DIR/config.gin; settings such as the number of hashes can be
overridden with --config.

A model of translation also translates the split, by beam search: sacreBLEU is printed with its
signature, DIR/translations_SPLIT.txt has the translations line for line, and
DIR/translations_SPLIT.tsv what each was made of and its score. --beam_size=0 leaves that out.
"""

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

from reformax.cli import config, script

# What an evaluation takes of the run's settings.
READ = (
    *script.MODEL,
    "task",
    "loss_chunk_len",
    "eval_batch_size",
    "eval_length",
    "eval_stride",
)


def main() -> int:
    """Flags, then gin, then one call."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    script.add_run_flags(parser)
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
    script.add_search_flags(parser)
    script.add_traceback_flag(parser)
    args = parser.parse_args()
    script.parse_run(args, args.data_dir)

    from reformax.generation.translation import check_options
    from reformax.training import loop
    from reformax.training.evaluation import evaluate
    from reformax.training.loss import metric_name

    if args.beam_size == 0:
        others = script.SEARCH.keys() - {"beam_size"}
        script.refuse(args, others, "with --beam_size=0 nothing is translated")
    else:
        check_options(**script.search_options(args))
    run = config.bindings(loop.train, READ)
    model, params, steps = script.restore_model(args, run)
    translation = run["task"].translation
    if translation is None:
        script.refuse(args, script.SEARCH, f"the task {run['task'].name} is no translation")
    else:
        script.keep_vocabulary(args, translation.vocabulary, steps[-1])
    length = args.length or run.get("eval_length") or run["length"]
    # The run's stride belongs to the run's length.
    stride = args.stride or (None if args.length else run.get("eval_stride")) or length
    result = evaluate(
        model,
        params,
        run["task"],
        args.split,
        batch_size=args.batch_size or run.get("eval_batch_size") or run["batch_size"],
        length=length,
        stride=stride,
        seed=args.seed,
        loss_chunk_len=run.get("loss_chunk_len"),
        progress=True,
    )
    script.note_unused(args, READ)
    result |= {"checkpoint_steps": steps, "seed": args.seed, "overrides": args.config}
    path = Path(args.output_dir) / f"evaluation_{args.split}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")  # it is kept if the search fails
    if translation is not None and args.beam_size != 0:
        result |= _translate(args, model, params, translation)
        path.write_text(json.dumps(result, indent=1) + "\n")
    context = f"at most {length} tokens (stride {stride})"
    if translation is not None:
        context = "its source and the tokens before it"
    print(
        f"{result['split']}: {result['n_targets']:,} targets, each predicted once from {context}, "
        f"{script.named(steps)}, in {path}"
    )
    print(f"accuracy: {result['accuracy']:.4f}")
    metric = metric_name(run["task"])
    print(f"{metric}: {result[metric]:.4f}")
    if "bleu" in result:
        for name in ("bleu", "bleu_uncased"):
            print(f"{name}: {result[name]:.2f} ({result[f'{name}_signature']})")
        print(f"exact: {result['exact']:.4f} of {result['n_sentences']:,} sentences")
    return 0


def _translate(args, model, params, translation) -> dict[str, Any]:
    """Translates the split, writes what came out and scores it."""
    from reformax.generation import translate_lines
    from reformax.generation.scores import score

    sources, references = translation.sentences(args.split)
    options = script.search_options(args)
    lines = translate_lines(
        model,
        params,
        translation.vocabulary,
        sources,
        **options,
        hash_seed=args.seed,
        progress=True,
    )
    path = Path(args.output_dir) / f"translations_{args.split}"
    texts = [line.text for line in lines]
    path.with_suffix(".txt").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    with path.with_suffix(".tsv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, "excel-tab", lineterminator="\n")
        table.writerow(["score", "log_p", "tokens", "translation", "source", "reference"])
        for line, *texts_of in zip(lines, sources, references, strict=True):
            numbers = [f"{line.score:.4f}", f"{line.log_p:.4f}", line.n_tokens]
            table.writerow([*numbers, line.text, *texts_of])
    return score(texts, references) | options | {"n_sentences": len(lines)}


if __name__ == "__main__":
    sys.exit(script.run(main))
