"""The Reformer paper's table of the duplication task, in small (section 2, table 2).

    python -m benchmarks.duplication --length 256 --steps 700

trains one-layer models on 0w0w, with full shared-QK attention and with LSH attention, and prints
the accuracy of each on the second w when it is evaluated with full attention and with 1 to 8
hashes. A model that learned by hashing keeps its accuracy under hashing; one that learned by
full attention need not.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from benchmarks.harness import command_line
from benchmarks.harness.language_models import Sizes
from benchmarks.harness.output import Table
from benchmarks.harness.training import train
from reformax.data import duplication
from reformax.models import ReformerLM
from reformax.ops import lsh, shared_qk
from reformax.training.evaluation import evaluate

SIZES = Sizes(d_model=128, d_ff=256, n_heads=4, d_head=32, n_layers=1)
# The number of hashes; 0 is full shared-QK attention.
TRAINED_WITH = {"full": 0, "LSH-4": 4, "LSH-1": 1}
EVALUATED_WITH = {"full": 0, "LSH-8": 8, "LSH-4": 4, "LSH-2": 2, "LSH-1": 1}


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


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__)
    for name, default in dict(length=256, batch_size=32, steps=700, chunk_len=32).items():
        text = f"default: {default}"
        parser.add_argument(f"--{name}", type=command_line.positive, default=default, help=text)
    parser.add_argument("--learning_rate", type=float, default=3e-3, help="default: 3e-3")
    args = parser.parse_args(argv)
    trained_with = TRAINED_WITH
    if args.tiny:
        args.length, args.batch_size, args.steps, args.chunk_len = 32, 2, 10, 8
        trained_with = {"LSH-1": 1}
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


if __name__ == "__main__":
    main()
