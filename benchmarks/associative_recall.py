"""Which attentions look keys up: multi-query associative recall, against the size of their state.

    python -m benchmarks.associative_recall --out recall.jsonl

trains small language models on `reformax.data.associative_recall` with each attention and prints,
for each number of pairs, the share of values that it names (Arora et al. 2023, "Zoology", section
4). The state is what decoding keeps of a row in the attention, once it has read the row; one
without a step of decoding has none.

A row is a model for each learning rate and each seed, which one program trains side by side; the
best one counts. It begins among few tokens and goes on among more, so that what a state can hold is
not mistaken for what is learnt slowly. A length ends before its last step once a model names 99.5%
of the values of a stretch of steps, which it has not seen before.

To answer, a model must know of a value which key stands before it. A window of two positions, the
first layer of all models, can tell; the attention in question follows, and looks keys up. Dense
attention learns this in some hundreds of steps. The paper has a convolution over three positions
before the attention in each of two layers. As there, models have no feed-forward layers (here they
have one feature, the least) and logits are products with the embedding; other than there, the
attention has no positions, matrices begin with a deviation of 0.05, not 0.02, and rows of few
pairs are as long as those of many. All rows weigh alike in the loss: few pairs are learnt first.

With `--out` each length of a row is a line of a file, and the same command goes on after an
interruption: a row that the file has whole is not trained again. All models see the same batches.
--at_once=3 has three processes, each of which trains one row after another. With --limit none goes
on after so many seconds.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness import command_line, lines
from benchmarks.harness.calls import PeerError, exit_if
from benchmarks.harness.output import Table
from benchmarks.harness.processes import ask, ask_each, sharing
from benchmarks.rows.recall import N_PAIRS, SEED, Members, Sizes, attentions, build
from reformax.ops.base import AttentionOp

Key = tuple[str, tuple[Sizes, ...]]  # of a row: the name of its attention, and each length


def state_bytes(ops: Sequence[AttentionOp], sizes: Sizes) -> float | None:
    """The bytes that decoding keeps of a row in these layers, after `length - 1` tokens."""
    model, length = build(ops, sizes, "eval"), sizes.length

    def read(tokens):
        key = jax.random.key(SEED)
        params = model.init_params(key, tokens.shape)
        _, decoding = model.prefill(params, tokens, jnp.full(1, length - 1), length, key)
        return decoding.caches

    try:
        caches = jax.eval_shape(read, jnp.zeros((1, length - 1), jnp.int32))
    except NotImplementedError:
        return None
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(caches))


def models(
    rows: Iterable[Key],
    members: Members,
    path: Path | None,
    at_once: int = 1,
    limit: float | None = None,
    only_known: bool = False,
) -> Iterator[tuple[Key, list[dict[str, Any] | Exception]]]:
    """The record of each length of each row, or the exception that it ended with, in order.

    Args:
      rows: the names and sizes of models.
      members: their rates of learning and seeds.
      path: of the file of records.
      at_once: processes that train side by side.
      limit: seconds, after which they are killed.
      only_known: whether those that the file lacks are left out, and any training will do.
    """
    before = lines.read(path)
    found: dict[Key, list[Any]] = {}
    for name, stages in rows:
        known = [
            _known(before, name, stages[: n + 1], members, only_known) for n in range(len(stages))
        ]
        found[name, stages] = [x for x in known if x] if only_known or all(known) else []
    asked = [] if only_known else [key for key in found if not found[key]]
    untried, error = set(asked), "no process was left"
    with tempfile.TemporaryDirectory() as claims:
        request = dict(
            rows=asked, members=members, claims=claims, end=limit and time.time() + limit
        )
        ours = functools.partial(ask, sys.executable, "rows.recall.train", patience=limit)
        start = functools.partial(ours, env=sharing(at_once), **request)
        answers = ask_each(dict.fromkeys(range(min(at_once, len(asked))), start), at_once)
        for key, known in found.items():
            while key in untried:
                _, answer = next(answers, (None, None))
                if answer is None:
                    known.append(PeerError(error))
                    untried.remove(key)
                elif "row" not in answer:  # a process has ended
                    error = answer["error"]
                else:
                    other = asked[answer["row"]]
                    record = answer.get("record") or PeerError(answer["error"])
                    found[other].append(record)
                    if isinstance(record, Exception) or len(found[other]) == len(other[1]):
                        untried.remove(other)
                    if path is not None and not isinstance(record, Exception):
                        lines.add(path, record)
            yield key, known
        for _ in answers:  # until their end processes look at what is claimed
            pass


def _known(
    records: Sequence[dict[str, Any]],
    name: str,
    stages: Sequence[Sizes],
    members: Members,
    any_training: bool,
) -> dict[str, Any] | None:
    """The newest record of the last of these lengths."""
    *begun, sizes = stages
    wanted = {"attention": name} | sizes._asdict()
    if any_training:
        del wanted["steps"], wanted["batch_size"], wanted["stretch"]
    else:
        wanted |= json.loads(json.dumps(members._asdict()))
        wanted["begun"] = [x.training() for x in begun]
    return next((x for x in reversed(records) if wanted.items() <= x.items()), None)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__)
    for name, default in dict(at_once=1, vocab_size=8192, seeds=1).items():
        text = f"default: {default:,}"
        parser.add_argument(f"--{name}", type=command_line.positive, default=default, help=text)
    several = dict(
        length=(command_line.positive, [64, 512, 4096], "tokens of an example, one after another"),
        tokens=(command_line.positive, [8192, 32768, 65536], "of a step, for each length"),
        steps=(command_line.positive, [1500, 600, 300], "for each length"),
        d_model=(command_line.positive, [64, 128], "sizes of the model"),
        learning_rate=(float, [3e-3, 1e-3], "the best one counts"),
    )
    for name, (kind, default, text) in several.items():
        text = f"{text} (default: {' '.join(map(str, default))})"
        parser.add_argument(f"--{name}", type=kind, nargs="+", default=default, help=text)
    known = attentions()
    parser.add_argument("--only", nargs="+", choices=known, default=known, help="these attentions")
    parser.add_argument("--limit", type=command_line.seconds, help="seconds of all models")
    parser.add_argument("--out", type=Path, metavar="FILE", help="lines of JSON, a length each")
    text = "train nothing: show what the file has, however it was trained"
    parser.add_argument("--only_known", action="store_true", help=text)
    args = parser.parse_args(argv)
    if not len(args.length) == len(args.tokens) == len(args.steps):
        example = "such as --length 512 --tokens 32768 --steps 600"
        parser.error(f"--length, --tokens and --steps: give as many of each, {example}")
    if min(args.length) < 4 * N_PAIRS[0]:
        least = f"expected at least {4 * N_PAIRS[0]}, for {N_PAIRS[0]} pairs"
        parser.error(f"--length is {min(args.length)}: {least}")
    n_eval = 256
    if args.tiny:
        args.length, args.tokens, args.steps, args.d_model = [16, 32], [64, 64], [2, 2], [8]
        args.learning_rate, n_eval = [1e-3], 4
    # Only the processes that train have a device.
    jax.config.update("jax_platforms", "cpu")
    rows = []
    for d_model, name in itertools.product(args.d_model, args.only):
        stages = tuple(
            Sizes(
                d_model=d_model,
                length=length,
                vocab_size=args.vocab_size,
                batch_size=max(1, tokens // length),
                steps=steps,
                stretch=min(100, steps),
                n_eval=n_eval,
            )
            for length, tokens, steps in zip(args.length, args.tokens, args.steps, strict=True)
        )
        rows.append((name, stages))
    members = Members(args.learning_rate, list(range(args.seeds)))
    found = list(models(rows, members, args.out, args.at_once, args.limit, args.only_known))
    show(found, known)
    exit_if(
        f"{name}, d_model={stages[0].d_model}"
        for (name, stages), results in found
        if any(isinstance(x, Exception) for x in results)
    )


def show(
    found: Sequence[tuple[Key, Sequence[dict[str, Any] | Exception]]],
    known: Mapping[str, Sequence[AttentionOp]],
) -> None:
    """Prints a table for each length.

    Args:
      found: records of rows by length.
      known: the attentions.
    """
    for n, length in enumerate(x.length for x in found[0][0][1]):
        table = None
        for (name, stages), results in found:
            sizes = stages[n]
            of_length = [
                x for x in results if not isinstance(x, Exception) and x["length"] == length
            ]
            one = of_length[0] if of_length else results[-1] if results else None
            if not of_length and not isinstance(one, Exception):
                continue
            if table is None:
                on = "" if isinstance(one, Exception) else f", {one['device']}"
                pairs = (f"{p} pairs" for p in sizes.n_pairs())
                columns = "d_model", "state, KiB", *pairs, "rate", "steps", "seconds"
                table = Table("attention", *columns, title=f"{length:,} tokens{on}")
            if not isinstance(one, Exception):
                one["state_bytes"] = state_bytes(known[name], sizes)
            table.result(name, str(sizes.d_model), known=one, cells=cells)


def cells(record: Mapping[str, Any]) -> list[str]:
    """The columns of a row from its state on."""
    state = record["state_bytes"]
    shares = (f"{100 * share:.1f}%" for share in record["accuracy"].values())
    kib = "-" if state is None else f"{state / 1024:,.1f}"
    last = f"{record['rate']:g}", f"{record['ended_after']:,}", f"{record['seconds']:.0f}"
    return [kib, *shares, *last]


if __name__ == "__main__":
    main()
