"""What a language model learns with one attention or another in every fourth layer.

    python -m benchmarks.global_layers --data_dir=FILE_OR_FOLDER --saved=FILE
    python -m benchmarks.global_layers --data_dir=FILE_OR_FOLDER --only compared linear_time

trains transformer_text_37m.gin for 900 steps with each attention in the place of
the layers that see every key, between windows, and prints bits per byte of the whole valid split
and tokens/s, the median over the steps. Keys are a projection of their own, without the next
value, but where the name says so. Rows are in groups: `compared` has dense attention, windows and
LSH attention, `linear_time` states of constant size and summaries, `hybrid` the delta rule in one
or two of these layers, and `chosen` attentions that choose where to look, at some 1,000 of 4,096
keys. --only names groups or rows, --seed another seed than 0, and --reversible takes
reformer_text_37m.gin. A folder of wheels is the text of
`reformax.data.package_sources`.

Each row is a process of its own. --at_once=3 has three on a GPU: they compile and evaluate side by
side and train in turn, so that tokens/s are of one alone. --gpus=2 spreads them over two. With
--limit no row goes on after so many seconds. --saved=FILE adds each row to a file as soon as it is
known, and a row that is there for as many steps on data of that name is not trained again.
--runs=FOLDER keeps the run of each row there, as 900_wheels/flash, and goes on with it, also with
one that the limit ended.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

from benchmarks.harness import campaign, command_line
from benchmarks.harness.calls import exit_if
from benchmarks.harness.output import Table
from benchmarks.harness.processes import Answer
from reformax.shell import user_path

NEXT_VALUE = "lm.{model}.next_value=True"
# The settings of each row, by group. A model's own are of {model}.
COMPARED = {
    "flash": ["global_attention=@flash.flash()"],
    "windows": ["global_attention=@local.local()"],
    "dense, shared keys, next value": [NEXT_VALUE],
    "lsh, shared keys, next value": ["global_attention=@lsh.lsh()", NEXT_VALUE],
    "lsh, shared keys": ["global_attention=@lsh.lsh()"],
    "lsh of 4 hashes, next value": [
        "global_attention=@lsh.lsh()",
        "lsh.lsh.n_hashes=4",
        NEXT_VALUE,
    ],
    "lsh of 4 hashes, chunks of 256, next value": [
        "global_attention=@lsh.lsh()",
        "lsh.lsh.n_hashes=4",
        "lsh.lsh.chunk_len=256",
        NEXT_VALUE,
    ],
    "dense, then lsh of 4 hashes, next value": [
        "global_attention=@lsh.lsh()",
        "lsh.lsh.n_hashes=4",
        NEXT_VALUE,
        "loop.train.stages=(@stages.Stage(),)",
        "stages.Stage.until=0.78",
        "stages.Stage.model=@dense/lm.{model}",
        "dense/lm.{model}.attention_type="
        "(@local.local(), @local.local(), @shared_qk.shared_qk(), @local.local())",
    ],
}
LINEAR_TIME = {
    "gated_linear(conv_size=4)": [
        "global_attention=@gated_linear.gated_linear()",
        "gated_linear.gated_linear.conv_size=4",
    ],
    "gated_linear(conv_size=4, gated=False)": [
        "global_attention=@gated_linear.gated_linear()",
        "gated_linear.gated_linear.conv_size=4",
        "gated_linear.gated_linear.gated=False",
    ],
    "retention": ["global_attention=@retention.retention()"],
    "retention(gated=False)": [
        "global_attention=@retention.retention()",
        "retention.retention.gated=False",
    ],
    "linear": ["global_attention=@linear.linear()"],
    "performer(n_features=128)": [
        "global_attention=@performer.performer()",
        "performer.performer.n_features=128",
    ],
    "gated_delta(conv_size=4, gated=True)": [
        "global_attention=@gated_delta.gated_delta()",
        "gated_delta.gated_delta.conv_size=4",
        "gated_delta.gated_delta.gated=True",
    ],
    "gated_delta(conv_size=4)": [
        "global_attention=@gated_delta.gated_delta()",
        "gated_delta.gated_delta.conv_size=4",
    ],
    "long_short": ["global_attention=@long_short.long_short()"],
}


def _hybrid(*ops: str) -> list[str]:
    """An attention each in layers 3, 7 and 11; the delta rule, if among them, with convolutions."""
    cycle = ", ".join(f"@local.local(), @local.local(), {op}, @local.local()" for op in ops)
    # 12 layers with --tiny too.
    return ["n_layers=12", f"attention=({cycle})", "gated_delta.gated_delta.conv_size=4"]


GATED_DELTA, WINDOWS, OTHER = "@gated_delta.gated_delta()", "@local.local()", "%global_attention"
# An attention that keeps all keys is last.
HYBRIDS = {
    "gated_delta twice, then flash": [
        *_hybrid(GATED_DELTA, GATED_DELTA, OTHER),
        "global_attention=@flash.flash()",
    ],
    "gated_delta twice, then lsh, next value": [
        *_hybrid(GATED_DELTA, GATED_DELTA, OTHER),
        "global_attention=@lsh.lsh()",
        NEXT_VALUE,
    ],
    "gated_delta, then lsh of 4 hashes twice, next value": [
        *_hybrid(GATED_DELTA, OTHER, OTHER),
        "global_attention=@lsh.lsh()",
        "lsh.lsh.n_hashes=4",
        NEXT_VALUE,
    ],
    "gated_delta, windows, then lsh, next value": [
        *_hybrid(GATED_DELTA, WINDOWS, OTHER),
        "global_attention=@lsh.lsh()",
        NEXT_VALUE,
    ],
}
CHOSEN = {
    "moba": ["global_attention=@moba.moba()", "moba.moba.block_size=64", "moba.moba.top_k=16"],
    "nsa, two heads of keys": [
        "global_attention=@nsa.nsa()",
        "nsa.nsa.n_selected=8",
        "nsa.nsa.window=128",
        "lm.{model}.n_kv_heads=2",
    ],
    "smyrf": [
        "global_attention=@smyrf.smyrf()",
        "smyrf.smyrf.chunk_len=128",
        "smyrf.smyrf.n_hashes=8",
    ],
    "asymmetric_lsh": [
        "global_attention=@asymmetric_lsh.asymmetric_lsh()",
        "asymmetric_lsh.asymmetric_lsh.chunk_len=128",
    ],
    "bigbird": [
        "global_attention=@block_sparse.block_sparse()",
        "block_sparse.block_sparse.block_size=64",
        "block_sparse.block_sparse.pattern=@block_patterns.bigbird()",
        "block_patterns.bigbird.n_random=12",
    ],
    "routing": [
        "global_attention=@routing.routing()",
        "routing.routing.n_clusters=4",
        "routing.routing.decay=0.99",
    ],
    "hash_sparse": [
        "global_attention=@hash_sparse.hash_sparse()",
        "hash_sparse.hash_sparse.n_buckets=4",
    ],
    "longformer, dilation 4": [
        "global_attention=@longformer.longformer()",
        "longformer.longformer.window=1024",
        "longformer.longformer.dilation=4",
    ],
    "dsa": ["global_attention=@dsa.dsa()", "dsa.dsa.top_k=1024", "dsa.dsa.n_index_heads=2"],
    "hash_sparse, shared keys, next value": [
        "global_attention=@hash_sparse.hash_sparse()",
        "hash_sparse.hash_sparse.n_buckets=4",
        "hash_sparse.hash_sparse.shared_qk=True",
        "hash_sparse.hash_sparse.attend_self_if_alone=False",
        NEXT_VALUE,
    ],
    "routing, shared keys, next value": [
        "global_attention=@routing.routing()",
        "routing.routing.n_clusters=4",
        "routing.routing.decay=0.99",
        "routing.routing.shared_qk=True",
        "routing.routing.attend_self_if_alone=False",
        NEXT_VALUE,
    ],
}
GROUPS = {
    "compared": COMPARED,
    "linear_time": LINEAR_TIME,
    "hybrid": HYBRIDS,
    "chosen": CHOSEN,
}
ROWS = {name: settings for rows in GROUPS.values() for name, settings in rows.items()}
TINY = [
    *("length=128", "batch_size=2", "d_model=16", "d_ff=16", "n_layers=4", "n_heads=2"),
    *("d_head=8", "loop.train.eval_stride=128", "loop.train.eval_batch_size=2"),
    *("loop.train.eval_tokens=256", "loop.train.eval_whole=False", "loop.train.log_every=1"),
    *("loop.train.task=@stdlib.stdlib()", "stdlib.stdlib.max_bytes=100_000"),
]


def config_of(name: str, args: argparse.Namespace) -> campaign.Part:
    """The config file of a row, and its further settings."""
    kind, model = ("reformer", "Reformer") if args.reversible else ("transformer", "Transformer")
    own = [setting.format(model=f"{model}LM") for setting in ROWS[name]]
    given = [] if NEXT_VALUE in ROWS[name] else [f"lm.{model}LM.next_value=False"]
    warmup = 300 if args.steps > 1000 else args.steps * 2 // 9
    given += [f"steps={args.steps}", f"warmup_steps={warmup}", "loop.train.eval_tokens=None"]
    given += ["loop.train.checkpoint_minutes=None", *(TINY if args.tiny else [])]
    if args.data_dir and any(args.data_dir.glob("*.whl")):
        given += ["loop.train.task=@package_sources.package_sources()"]
    return f"{kind}_text_37m.gin", given + own


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__)
    text = "the text: a file, a folder, or a folder of wheels"
    parser.add_argument("--data_dir", type=functools.partial(user_path, "data_dir"), help=text)
    parser.add_argument("--steps", type=command_line.positive, default=900, help="default: 900")
    parser.add_argument("--reversible", action="store_true", help="reversible stacks")
    campaign.flags(parser, GROUPS)
    args = parser.parse_args(argv)
    if args.tiny:
        args.steps = 3
    elif not args.data_dir:
        parser.error("--data_dir is missing: give the text to train on")

    run = {"steps": args.steps, "reversible": args.reversible, "tiny": args.tiny}
    table = Table("layers 3, 7 and 11", "bits per byte", "targets", "tokens/s")
    failed = []
    rows = campaign.chosen(args, GROUPS)
    for name, known in campaign.trained(rows, lambda name: [config_of(name, args)], run, args):
        table.result(name, known=known, cells=_cells)
        failed += [name] * isinstance(known, Exception)
    exit_if(failed)


def _cells(trained: Answer) -> list[str]:
    speed = trained["tokens_per_second"]
    return [f"{trained['bits']:.3f}", f"{trained['n_targets']:,}", f"{speed:,.0f}"]


if __name__ == "__main__":
    main()
