"""The Reformer paper's table of the duplication task, in small (section 2, table 2).

    python -m benchmarks.duplication --length 256 --steps 700

trains one-layer models on 0w0w, with full shared-QK attention and with LSH attention, and prints
the accuracy of each on the second w when it is evaluated with full attention and with 1 to 8
hashes. A model that learned by hashing keeps its accuracy under hashing; one that learned by
full attention need not.

    python -m benchmarks.duplication --by_content --lengths 1024 16384 65536

has models of any length. A window of four positions gathers the last four symbols, and the second
layer, which has no positions, finds the same four before and reads what came next. It learns this
in stages, of 256 tokens first, and prints after each one the accuracy at every length. Figures
come on stderr as they become known. The flags of the first table change nothing here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

from benchmarks.harness import command_line
from benchmarks.harness.language_models import Sizes
from benchmarks.harness.output import Table
from benchmarks.harness.rows import EXACT
from benchmarks.harness.training import Stage, train, train_in_stages
from reformax.data import duplication
from reformax.models import ReformerLM
from reformax.ops import local, lsh, shared_qk
from reformax.training.evaluation import evaluate

SIZES = Sizes(d_model=128, d_ff=256, n_heads=4, d_head=32, n_layers=1)
# The number of hashes; 0 is full shared-QK attention.
TRAINED_WITH = {"full": 0, "LSH-4": 4, "LSH-1": 1}
EVALUATED_WITH = {"full": 0, "LSH-8": 8, "LSH-4": 4, "LSH-2": 2, "LSH-1": 1}

BY_CONTENT = Sizes(d_model=64, d_ff=128, n_heads=2, d_head=32, n_layers=2)
SYMBOLS = 4  # that a window gathers: of 127^4 words few stand twice in 32,768 places
# The same symbols make the same vector, whose bucket is the same among any number of buckets. With
# few, as "auto" makes them for vectors that are alike, the largest outgrow two chunks.
BUCKETS = (128, 128)
# Tokens, rows, steps and the rate of learning of each stage.
STAGES = ((256, 16, 300, 5e-3), (4096, 2, 40, 3e-3), (16384, 1, 16, 2e-3))
MOST_FULL = 4096  # tokens of an evaluation with full attention
EVALUATED = 2**17  # tokens of a length


def model(length: int, chunk_len: int, n_hashes: int, mode: str):
    """One layer and a learned embedding of each position: the task is to find a distance."""
    hashed = lsh.lsh(chunk_len=chunk_len, n_hashes=n_hashes) if n_hashes else None
    return ReformerLM(
        **SIZES.arguments() | dict(vocab_size=128),
        dropout=0.0,
        attention_type=hashed or shared_qk.shared_qk(),
        pos_type="axial",
        pos_axial_shape=(length,),
        pos_d_axial_embs=(SIZES.d_model,),
        mode=mode,
    )


def model_by_content(chunk_len: int, n_hashes: int, mode: str):
    """A window, then attention to the same symbols: a key brings the value after it too."""
    hashed = functools.partial(
        lsh.lsh, chunk_len=chunk_len, n_buckets=BUCKETS, attend_self_if_alone=False
    )
    found = (
        hashed(n_hashes=n_hashes) if n_hashes else shared_qk.shared_qk(attend_self_if_alone=False)
    )
    return ReformerLM(
        **BY_CONTENT.arguments() | dict(vocab_size=128),
        dropout=0.0,
        attention_type=(local.local(window=SYMBOLS, chunk_len=32), found),
        pos_type="rotary_local",
        next_value=True,
        n_slots=4,
        mode=mode,
    )


def distances(args) -> None:
    """The paper's table."""
    trained_with = {"LSH-1": 1} if args.tiny else TRAINED_WITH
    task = duplication.duplication(length=args.length, n_eval=4 if args.tiny else 128)
    build = functools.partial(model, args.length, args.chunk_len)
    sizes = dict(batch_size=args.batch_size, length=args.length)
    table = Table("trained with", *EVALUATED_WITH)
    for name, n_hashes in trained_with.items():
        trained = functools.partial(build, n_hashes)
        params = train(trained, task, args.steps, args.learning_rate, **sizes)
        models = [build(n, "eval") for n in EVALUATED_WITH.values()]
        scores = [evaluate(one, params, task, **sizes)["accuracy"] for one in models]
        table.row(name, *(f"{100 * accuracy:.1f}%" for accuracy in scores))


def by_content(args) -> None:
    """The table of models of any length: a row for each stage and each length evaluated."""
    stages, chunk_len, evaluated = STAGES, 64, EVALUATED
    if args.tiny:
        stages, chunk_len, evaluated = ((32, 2, 2, 1e-3), (64, 1, 2, 1e-3)), 8, 64
    stages = [
        Stage(duplication.duplication(length=length, n_eval=1), batch_size, length, *rest)
        for length, batch_size, *rest in stages
        if length <= args.longest
    ]
    tasks = {
        length: duplication.duplication(length=length, n_eval=max(1, evaluated // length))
        for length in args.lengths
    }
    build = functools.partial(model_by_content, chunk_len)
    # Compiled once for all weights.
    models = {
        name: build(n, "eval") for name, n in EVALUATED_WITH.items() if n in (0, *args.hashes)
    }
    print(command_line.machine(), flush=True)
    table = Table("trained with", "evaluated at", *models)
    rows = [("LSH-4", 4, stages)] + [("full", 0, stages[:1])] * (not args.tiny)
    for name, n_hashes, parts in rows:
        trained = train_in_stages(functools.partial(build, n_hashes), parts)
        for params, stage in zip(trained, parts, strict=True):
            trained_with = f"{name}, up to {stage.length:,} tokens"
            for length, task in tasks.items():
                scores = []
                for other, built in models.items():
                    scores.append(_score(built, params, task, length))
                    text = f"{trained_with}: {scores[-1]} at {length:,} with {other}"
                    print(text, file=sys.stderr, flush=True)
                table.row(trained_with, f"{length:,}", *scores)


def _score(built, params, task, length: int) -> str:
    """The accuracy on a task; a dash where full attention would take too much."""
    *_, op = built.attention_type
    if isinstance(op, EXACT) and length > MOST_FULL:
        return "-"
    rows = max(1, MOST_FULL // length)
    return f"{100 * evaluate(built, params, task, batch_size=rows, length=length)['accuracy']:.2f}%"


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__)
    for name, default in dict(length=256, batch_size=32, steps=700, chunk_len=32).items():
        text = f"default: {default}"
        parser.add_argument(f"--{name}", type=command_line.positive, default=default, help=text)
    parser.add_argument("--learning_rate", type=float, default=3e-3, help="default: 3e-3")
    parser.add_argument("--by_content", action="store_true", help="the second table")
    text = "tokens of its evaluations (default: 1024 16384 65536)"
    lengths = dict(type=command_line.positive, nargs="+", default=[1024, 16384, 65536])
    parser.add_argument("--lengths", help=text, **lengths)
    hashes = [n for n in EVALUATED_WITH.values() if n]
    text = "of its evaluations (default: all)"
    known = dict(type=int, nargs="+", choices=hashes, default=hashes)
    parser.add_argument("--hashes", help=text, **known)
    trained = [length for length, *_ in STAGES]
    text = "tokens of its last stage (default: %(default)s)"
    parser.add_argument("--longest", type=int, choices=trained, default=trained[-1], help=text)
    args = parser.parse_args(argv)
    if args.tiny:
        args.length, args.batch_size, args.steps, args.chunk_len = 32, 2, 10, 8
        args.lengths, args.hashes = [64], [1]
    (by_content if args.by_content else distances)(args)


if __name__ == "__main__":
    main()
