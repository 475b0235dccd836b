"""Which attentions look keys up: multi-query associative recall, against the size of their state.

    python -m benchmarks.associative_recall --out recall.jsonl

trains small language models on `reformax.data.associative_recall` with each attention and prints,
for each number of pairs, the share of values that it names (Arora et al. 2023, "Zoology", section
4). The state is what decoding keeps of a row in the attention, once it has read the row; one
without a step of decoding has none. Of several learning rates a model's best counts. A training
ends before its last step, and no further rate is tried, once a model names 99.5% of the values
of a stretch of steps, which it has not seen before.

To answer, a model must know of a value which key stands before it. A window of two positions, the
first layer of all models, can tell; the attention in question follows, and looks keys up. Dense
attention learns this in some hundreds of steps. The paper has a convolution over three positions
before the attention in each of two layers. As there, models have no feed-forward layers (here they
have one feature, the least) and logits are products with the embedding; other than there, the
attention has no positions, matrices begin with a deviation of 0.05, not 0.02, and rows of few
pairs are as long as those of many. All rows weigh alike in the loss: few pairs are learnt first.

With `--out` each model is a line of a file, and the same command goes on after an interruption:
what the file has is not trained again. All models see the same batches. --at_once=3 has three
processes, each of which trains one model after another. With --limit none goes on after so many
seconds.
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

from benchmarks.harness import command_line
from benchmarks.harness.calls import PeerError, exit_if
from benchmarks.harness.output import Table, plot
from benchmarks.harness.processes import ask, ask_each, sharing
from benchmarks.rows.recall import SEED, Sizes, attentions, build, ended
from reformax.ops.base import AttentionOp

# Of figures: a state of constant size, a window; the rest grow with the length.
COLOURS = dict.fromkeys(("linear", "performer", "retention", "gated_linear", "gated_delta"), "C3")
COLOURS |= dict.fromkeys(("local", "sinks", "longformer"), "C2")
Key = tuple[str, Sizes]  # of a model: the name of its attention


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


def recorded(path: Path | None) -> list[dict[str, Any]]:
    """The models of a file. A last line that an interruption cut is taken away."""
    if path is None or not path.exists():
        return []
    text = path.read_text()
    whole, newline, cut = text.rpartition("\n")
    if cut:
        path.write_text(whole + newline)
    return [json.loads(line) for line in whole.splitlines()]


def models(
    rows: Iterable[Key],
    rates: Sequence[float],
    path: Path | None,
    at_once: int = 1,
    limit: float | None = None,
    only_known: bool = False,
) -> Iterator[tuple[Key, Any]]:
    """The record of each best model, or the exception in its place, in order.

    Args:
      rows: the names and sizes of models.
      rates: of learning, tried in this order.
      path: of the file of records, one for each rate.
      at_once: processes that train side by side.
      limit: seconds, after which they are killed.
      only_known: whether those that the file lacks are left out, and any number of steps will do.
    """
    before = recorded(path)
    found: dict[Key, list[dict[str, Any]] | Exception] = {}
    untried: dict[Key, list[float]] = {}
    for name, sizes in rows:
        wanted = {"attention": name} | sizes._asdict()
        if only_known:
            del wanted["steps"]
        known = {x["rate"]: x for x in reversed(before) if wanted.items() <= x.items()}
        found[name, sizes] = [known[rate] for rate in rates if rate in known]
        enough = (i for i, x in enumerate(rates) if x in known and ended(known[x], sizes))
        left = [rate for rate in rates[: next(enough, None)] if rate not in known]
        if left and not only_known:
            untried[name, sizes] = left
    asked, error = list(untried), "no process was left"
    with tempfile.TemporaryDirectory() as claims:
        request = dict(
            rows=[(*key, untried[key]) for key in asked],
            claims=claims,
            end=None if limit is None else time.time() + limit,
        )
        ours = functools.partial(ask, sys.executable, "rows.recall.train", patience=limit)
        start = functools.partial(ours, env=sharing(at_once), **request)
        answers = ask_each(dict.fromkeys(range(min(at_once, len(asked))), start), at_once)
        for key in found:
            while key in untried:
                _, answer = next(answers, (None, None))
                if answer is None:
                    found[key] = PeerError(error)
                    del untried[key]
                elif "row" not in answer:  # a process has ended
                    error = answer["error"]
                elif "error" in answer:
                    other = asked[answer["row"]]
                    found[other] = PeerError(answer["error"])
                    del untried[other]
                else:
                    other, record = asked[answer["row"]], answer["record"]
                    found[other].append(record)
                    untried[other].remove(record["rate"])
                    if not untried[other] or ended(record, other[1]):
                        del untried[other]
                    if path is not None:
                        with path.open("a") as file:
                            file.write(json.dumps(record) + "\n")
            records = found[key]
            if isinstance(records, Exception):
                yield key, records
            elif records:
                yield key, max(records, key=lambda one: sum(one["accuracy"].values()))
        for _ in answers:  # until their end processes look at what is claimed
            pass


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__, plot=Path("docs/associative_recall.png"))
    for name, default in dict(tokens=32768, steps=1500, at_once=1, vocab_size=8192).items():
        text = f"default: {default:,}"
        parser.add_argument(f"--{name}", type=command_line.positive, default=default, help=text)
    several = dict(
        length=(command_line.positive, [512], "tokens of an example"),
        d_model=(command_line.positive, [64, 128], "sizes of the model"),
        learning_rate=(float, [3e-3, 1e-3], "each is tried until one is enough"),
    )
    for name, (kind, default, text) in several.items():
        text = f"{text} (default: {' '.join(map(str, default))})"
        parser.add_argument(f"--{name}", type=kind, nargs="+", default=default, help=text)
    known = attentions()
    parser.add_argument("--only", nargs="+", choices=known, default=known, help="these attentions")
    parser.add_argument("--limit", type=float, help="seconds of all models")
    parser.add_argument("--out", type=Path, metavar="FILE", help="lines of JSON, a model each")
    text = "train nothing: show what the file has, of any number of steps"
    parser.add_argument("--only_known", action="store_true", help=text)
    args = parser.parse_args(argv)
    n_eval = 256
    if args.tiny:
        args.length, args.tokens, args.steps, args.d_model = [32], 64, 2, [8]
        args.learning_rate, n_eval = [1e-3], 4
    # Only the processes that train have a device.
    jax.config.update("jax_platforms", "cpu")
    rows = []
    for length, d_model, name in itertools.product(args.length, args.d_model, args.only):
        sizes = Sizes(
            d_model=d_model,
            length=length,
            vocab_size=args.vocab_size,
            batch_size=max(1, args.tokens // length),
            steps=args.steps,
            stretch=min(100, args.steps),
            n_eval=n_eval,
        )
        rows.append((name, sizes))
    panels: dict[str, dict[str, dict[int, float]]] = {}
    failed = []
    for (name, sizes), one in models(
        rows, args.learning_rate, args.out, args.at_once, args.limit, args.only_known
    ):
        n_pairs = sizes.n_pairs()
        labels = {
            n: f"accuracy with {n} pairs in {sizes.length:,} tokens"
            for n in (n_pairs[len(n_pairs) // 2], n_pairs[-1])
        }
        if not panels.keys() & labels.values():
            pairs = (f"{n} pairs" for n in n_pairs)
            columns = "d_model", "state, KiB", *pairs, "rate", "steps", "seconds"
            on = "" if isinstance(one, Exception) else f", {one['device']}"
            table = Table("attention", *columns, title=f"{sizes.length:,} tokens{on}")
        if isinstance(one, Exception):
            failed.append(f"{name}, d_model={sizes.d_model}, length={sizes.length}")
        else:
            one["state_bytes"] = state = state_bytes(known[name], sizes)
            if state is not None:
                kib = max(1, round(state / 1024))
                for n, label in labels.items():
                    lines = panels.setdefault(label, {}).setdefault(name, {})
                    lines[kib] = one["accuracy"][str(n)]
        table.result(name, str(sizes.d_model), known=one, cells=cells)
    axes = dict(yscale="linear", xlabel="state of the attention, KiB", ylim=(-0.02, 1.02))
    if panels:
        states = [kib for lines in panels.values() for points in lines.values() for kib in points]
        ticks = [2**i for i in range(min(states).bit_length() - 1, max(states).bit_length() + 1)]
        plot(args.plot, panels, styles=styles(known), ticks=ticks, **axes)
    exit_if(failed)


def styles(known: Mapping[str, Sequence[AttentionOp]]) -> dict[str, dict[str, Any]]:
    """Of lines: a colour for each kind of state, a marker for each of a kind."""
    found: dict[str, dict[str, Any]] = {}
    kinds: list[str] = []
    for name, ops in known.items():
        kinds.append("C1" if len(ops) > 1 else COLOURS.get(ops[0].name, "C0"))
        found[name] = dict(
            color=kinds[-1], marker="oDv^XpsP*hd<>8"[kinds.count(kinds[-1]) % 14], ms=5
        )
    return found


def cells(record: Mapping[str, Any]) -> list[str]:
    """The columns of a row from its state on."""
    state = record["state_bytes"]
    shares = (f"{100 * share:.1f}%" for share in record["accuracy"].values())
    kib = "-" if state is None else f"{state / 1024:,.1f}"
    last = f"{record['rate']:g}", f"{record['ended_after']:,}", f"{record['seconds']:.0f}"
    return [kib, *shares, *last]


if __name__ == "__main__":
    main()
