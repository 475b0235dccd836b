"""Scores a trained model on every target of a split: `python evaluate.py --output_dir=DIR`.

Prints bits per dim and writes the same to DIR/evaluation_SPLIT.json. The model and the task are
those of DIR/config.gin; settings such as the number of hashes can be overridden with --config.
"""

import argparse
import json
import sys
from pathlib import Path

from reformax.training import config, script

# What an evaluation takes of the run's settings.
RUN = ("model", "task", "batch_size", "length", "loss_chunk_len")
READ = (*RUN, "eval_batch_size", "eval_length", "eval_stride")


def main() -> int:
    """Flags, then gin, then one call."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--output_dir", required=True, help="a folder that train.py wrote")
    parser.add_argument("--split", default="valid", choices=["train", "valid", "test"])
    parser.add_argument("--length", type=int, help="context in tokens (default: the run's)")
    parser.add_argument(
        "--stride",
        type=int,
        help="tokens the context moves by: each window predicts its last STRIDE, so a smaller one "
        "gives every prediction more context and costs more (default: the run's, or the length)",
    )
    parser.add_argument("--batch_size", type=int, help="windows at a time (default: the run's)")
    parser.add_argument("--checkpoint", default="best", help="best, latest or a step")
    parser.add_argument("--seed", type=int, default=0, help="of the hashes")
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="one setting; repeatable",
    )
    parser.add_argument("--data_dir", help="where the task finds its data")
    script.add_traceback_flag(parser)
    args = parser.parse_args()
    folder = Path(args.output_dir)
    config.parse([str(script.config_file(folder))], args.config, data_dir=args.data_dir)

    import jax

    from reformax.training import loop
    from reformax.training.checkpoint import Checkpoints
    from reformax.training.evaluation import evaluate

    run = config.bindings(loop.train)
    checkpoints = Checkpoints(folder)
    step = _checkpoint_step(checkpoints, args.checkpoint)
    model = run["model"](mode="eval")
    shape = (run["batch_size"], run["length"])
    like = jax.eval_shape(lambda key: model.init_params(key, shape), jax.random.PRNGKey(0))
    params, _ = checkpoints.restore_params(step, like)
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
    for override in config.unused(args.config, also_used=[f"loop.train.{name}" for name in READ]):
        print(f"note: --config={override!r} set something that this evaluation did not use")
    result |= {"checkpoint_step": step, "seed": args.seed, "overrides": args.config}
    path = folder / f"evaluation_{args.split}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"{result['split']}: {result['n_targets']:,} targets, each predicted once from at most "
        f"{length} tokens (stride {stride}), checkpoint of step {step}, in {path}"
    )
    print(f"accuracy: {result['accuracy']:.4f}")
    print(f"bits_per_dim: {result['bits_per_dim']:.4f}")
    return 0


def _checkpoint_step(checkpoints, which: str) -> int:
    steps = checkpoints.steps()
    if not steps:
        raise ValueError(f"no checkpoint in {checkpoints.folder}: train.py saves one after a while")
    if which == "latest":
        return steps[-1]
    if which == "best":  # a run stopped before its first evaluation has only unscored ones
        best = checkpoints.best_step()
        return steps[-1] if best is None else best
    if not which.isdigit():
        raise ValueError(f"checkpoint={which} must be best, latest or one of the steps {steps}")
    return int(which)


if __name__ == "__main__":
    sys.exit(script.run(main))
