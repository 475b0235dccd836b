"""Scores a trained model on every target of a split: `python evaluate.py --output_dir=DIR`.

Prints bits per dim (of a translation: per token) and writes the same to DIR/evaluation_SPLIT.json.
The model and the task are those of DIR/config.gin; settings such as the number of hashes can be
overridden with --config.
"""

import argparse
import json
import sys
from pathlib import Path

from reformax.training import config, script

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
    script.add_traceback_flag(parser)
    args = parser.parse_args()
    script.parse_run(args, args.data_dir)

    from reformax.training import loop
    from reformax.training.evaluation import evaluate
    from reformax.training.loss import metric_name

    run = config.bindings(loop.train, READ)
    model, params, steps = script.restore_model(args, run)
    if run["task"].translation is not None:
        script.keep_vocabulary(args, run["task"].translation.vocabulary, steps[-1])
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
        loss_chunk_len=run.get("loss_chunk_len", 1024),
        progress=True,
    )
    script.note_unused(args, READ)
    result |= {"checkpoint_steps": steps, "seed": args.seed, "overrides": args.config}
    path = Path(args.output_dir) / f"evaluation_{args.split}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    context = f"at most {length} tokens (stride {stride})"
    if run["task"].translation is not None:
        context = "its source and the tokens before it"
    print(
        f"{result['split']}: {result['n_targets']:,} targets, each predicted once from {context}, "
        f"{script.named(steps)}, in {path}"
    )
    print(f"accuracy: {result['accuracy']:.4f}")
    metric = metric_name(run["task"])
    print(f"{metric}: {result[metric]:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(script.run(main))
