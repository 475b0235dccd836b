"""Long ListOps: the value of a nested list of operations, such as [MAX 2 9 [MIN 4 7 ] 0 ].

Nangia and Bowman 2018, "ListOps: A Diagnostic Dataset for Latent Tree Learning", section 2, in the
lengths of Tay et al. 2020, "Long Range Arena", section 2.2.1. The parentheses of the published
files, which Long Range Arena's tokenizer drops, are left out.

A tree is drawn from its root: a node above `max_depth` is an operation with probability 1/4, of 2
to `max_args` arguments, and else a digit. Trees of other lengths are thrown away. Many trees are
drawn at once, a level at a time, so that a thousand examples take well below a second.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from jaxtyping import Int, UInt8

from reformax.data import files, splits, tables
from reformax.data.base import SPLITS
from reformax.data.labelled import labelled_task, padded, stored_task
from reformax.data.synthetic_blocks import Block, synthetic_blocks
from reformax.declared import Bounds, PathName, Seed, SettingError, Size, checked
from reformax.task import Labels, Task

# Token 0 is padding; digit d is d + 1.
WORDS = ("", *map(str, range(10)), "[MIN", "[MAX", "[MED", "[SM", "]")
_TOKENS = {word: i for i, word in enumerate(WORDS) if word}
_DIGITS = set(map(str, range(10)))
_OPERATIONS, _CLOSE = 11, 15
_LIKELY = 0.25
BLOCK = 500  # examples that are drawn together
_TREES = 2048  # drawn at once
_DRAWS = 20  # after which at least one example a draw must have been found

Args = Annotated[int, Bounds(2, 100)]
Depth = Annotated[int, Bounds(2, 100)]


@checked
def listops(
    min_length: Size = 500,
    max_length: Size = 2000,
    max_depth: Depth = 10,
    max_args: Args = 10,
    n_train: Size = 96_000,
    n_eval: Size = 2_000,
    data_seed: Seed = 0,
    data_dir: PathName | None = None,
    cache_dir: PathName | None = None,
) -> Task:
    """Name the digit that a list of operations comes to: minimum, maximum, median, sum modulo 10.

    The median of an even number of arguments is the mean of the middle two, rounded down. The
    defaults are those of Long Range Arena. Example i of a split is a function of (data_seed, split,
    i // 500).

    Args:
      min_length: examples are longer, in tokens.
      max_length: examples are shorter.
      max_depth: levels of a tree, of which the last has digits alone.
      max_args: the most arguments of an operation.
      n_train: examples to train on.
      n_eval: examples of 'valid' and of 'test'.
      data_seed: another one makes another set.
      data_dir: a folder with published lists to read: one .tsv for each split, such as Long Range
        Arena's basic_train.tsv, basic_val.tsv and basic_test.tsv, with the columns Source and
        Target. The first `n_train` and `n_eval` are taken. None: lists are drawn.
      cache_dir: a folder to keep drawn lists in, 0.5 KB each. Drawing takes 0.3 ms a list, and
        several processes may fill one folder. None: they stay in memory alone, `max_length` bytes
        each.

    Raises:
      ValueError: the lengths leave no room, or hardly any tree has one of them; a file is
        damaged, or has a line that is no list; or lists are read, and a setting is of drawn ones.
      FileNotFoundError: data_dir, or a split's file when it is read, is not there.
      OSError: the folder cannot be read or written.
    """
    if max_length - min_length < 2:
        raise SettingError(
            f"min_length={min_length} and max_length={max_length}: expected a difference of 2 or "
            "more, because examples lie between them"
        )

    if data_dir is not None:
        of_drawn = dict(min_length=min_length, max_depth=max_depth, max_args=max_args)
        of_drawn |= dict(data_seed=data_seed, cache_dir=cache_dir)
        for name, value in of_drawn.items():
            if value != inspect.signature(listops).parameters[name].default:
                raise SettingError(
                    f"{name} is {value!r}: lists of data_dir are read, not drawn: leave it or "
                    "data_dir out"
                )
        return _published(files.existing(data_dir), max_length, n_train, n_eval)

    def draw(rng: np.random.Generator) -> Block:
        rows: list[np.ndarray] = []
        values: list[np.ndarray] = []
        draws = 0
        while len(rows) < BLOCK:
            found = trees(rng, _TREES, min_length, max_length, max_depth, max_args)
            rows += found.rows
            values.append(found.values)
            draws += 1
            if draws >= _DRAWS and len(rows) < draws:
                raise SettingError(
                    f"min_length={min_length}, max_length={max_length}: of {_TREES * draws:,} "
                    f"trees {len(rows)} are of such a length: set max_depth or max_args higher, or "
                    "other lengths"
                )
        tokens = padded(rows[:BLOCK], max_length - 1).astype(np.uint8)
        return Block(tokens, np.concatenate(values)[:BLOCK].astype(np.uint8))

    stem = f"listops_{min_length}_{max_length}_{max_depth}_{max_args}"
    kept = synthetic_blocks(draw, BLOCK, data_seed, stem, cache_dir)

    made_by = (
        f"min_length={min_length}, max_length={max_length}, max_depth={max_depth}, "
        f"max_args={max_args}, data_seed={data_seed}"
    )
    sizes = {"train": n_train, "valid": n_eval, "test": n_eval}
    return labelled_task(
        "listops",
        vocab_size=len(WORDS),
        labels=Labels(10),
        sizes=sizes,
        examples=kept,
        made_by=lambda split: f"{sizes[split]} examples of {made_by}",
        longest=max_length - 1,
        in_order=True,
    )


def _published(folder: Path, max_length: int, n_train: int, n_eval: int) -> Task:
    """The task of lists in files."""
    if not folder.is_dir():
        raise SettingError(f"data_dir is {folder}: give the folder of the .tsv files")

    files_of = {split: [] for split in SPLITS}
    for path in files.list_files(folder, "*.tsv", deep=False):
        if found := splits.named(path.name):
            files_of[found.split].append(path)

    def file_of(split: str) -> Path:
        found = files_of[split]
        if len(found) != 1:
            there = f"several of {split}: {', '.join(x.name for x in found)}" if found else "none"
            raise files.Missing(
                f"{folder} has {there}: expected one .tsv of each split, such as basic_train.tsv; "
                "what was drawn is kept by listops.listops.cache_dir"
            )
        return found[0]

    def read(split: str) -> tuple[list[bytes], list[int]]:
        return _read(file_of(split), max_length, n_train if split == "train" else n_eval)

    sizes = {"vocab_size": len(WORDS), "labels": Labels(10), "longest": max_length - 1}
    task = stored_task("listops", **sizes, read=read)

    def summary() -> list[str]:
        there = [split for split in SPLITS if len(files_of[split]) == 1]
        sizes = [f"{s} {task.n_targets(s):,} lists ({file_of(s).name})" for s in there]
        return [f"{folder}: {'; '.join(sizes)}"]

    return task.replace(summary=summary)


def _read(path: Path, max_length: int, most: int) -> tuple[list[bytes], list[int]]:
    """The lists of a file, a byte less than each token, and what they come to."""
    rows: list[bytes] = []
    classes: list[int] = []
    columns = {"Source": 0, "Target": 1}
    for number, fields in enumerate(tables.delimited_rows(path, "\t"), start=1):
        if number == 1 and set(columns) <= set(fields):
            columns = {name: fields.index(name) for name in columns}
            continue
        if len(rows) == most:
            break
        where = f"{path} row {number:,}"
        if len(fields) <= max(columns.values()) or fields[columns["Target"]] not in _DIGITS:
            raise SettingError(f"{where}: expected a list and its digit, with a tab between them")
        words = fields[columns["Source"]].replace("(", " ").replace(")", " ").split()
        if len(words) >= max_length:
            raise SettingError(
                f"{where} has {len(words):,} tokens: set listops.listops.max_length to "
                f"{len(words) + 1:,} or more"
            )
        try:
            rows.append(bytes(_TOKENS[word] - 1 for word in words))
        except KeyError as error:
            raise SettingError(
                f"{where} has {error.args[0]!r}, which is no word of a list"
            ) from None
        classes.append(int(fields[columns["Target"]]))
    if not rows:
        raise SettingError(f"{path} has no list: give a file that has some")
    return rows, classes


class Trees(NamedTuple):
    """Lists of operations, and what they come to."""

    rows: list[UInt8[np.ndarray, " _"]]  # tokens
    values: Int[np.ndarray, " n"]


class _Level(NamedTuple):
    """The nodes of one depth, those of a tree together and in order."""

    tree: Int[np.ndarray, " m"]
    parent: Int[np.ndarray, " m"]  # among the operations of the level above
    argument: Int[np.ndarray, " m"]  # its index among its siblings
    n_args: Int[np.ndarray, " m"]  # 0: a digit
    word: Int[np.ndarray, " m"]  # the digit, or which operation

    def of(self, kept: np.ndarray, above: np.ndarray) -> _Level:
        """The nodes of the kept trees, whose parents are numbered by `above`."""
        tree, parent, *others = (x[kept[self.tree]] for x in self)
        return _Level(np.cumsum(kept)[tree] - 1, above[parent], *others)


def trees(
    rng: np.random.Generator,
    n: int,
    min_length: int,
    max_length: int,
    max_depth: int,
    max_args: int,
) -> Trees:
    """Draws `n` random trees with lengths from `min_length` to `max_length`."""
    levels = _drawn(rng, n, max_depth, max_args)
    length = sum(
        np.bincount(level.tree, np.where(level.n_args, 2, 1), minlength=n) for level in levels
    )
    kept = (length > min_length) & (length < max_length)
    above, chosen = np.zeros(1, int), []
    for level in levels:
        chosen.append(level.of(kept, above))
        is_kept = kept[level.tree[level.n_args > 0]]  # of the operations
        above = np.cumsum(is_kept) - 1
    lengths, values = _computed(chosen, max_args)
    tokens, ends = _written(chosen, lengths), np.cumsum(lengths[0])
    return Trees(np.split(tokens, ends[:-1]) if len(ends) else [], values)


def _drawn(rng: np.random.Generator, n: int, max_depth: int, max_args: int) -> list[_Level]:
    levels, tree = [], np.arange(n)
    parent = argument = np.zeros(n, int)
    for depth in range(1, max_depth + 1):
        m = len(tree)
        digits, operations = rng.integers(10, size=m), rng.integers(4, size=m)
        n_args = rng.integers(2, max_args + 1, size=m)
        n_args *= (rng.random(m) < _LIKELY) & (depth < max_depth)
        word = np.where(n_args, operations, digits)
        levels.append(_Level(tree, parent, argument, n_args, word))
        n_args, tree = n_args[n_args > 0], tree[n_args > 0]
        parent = np.repeat(np.arange(len(n_args)), n_args)
        argument = np.arange(len(parent)) - np.repeat(np.cumsum(n_args) - n_args, n_args)
        tree = tree[parent]
    return levels


def _computed(levels: list[_Level], max_args: int) -> tuple[list[np.ndarray], np.ndarray]:
    """The length of each node's list, level by level, and the values of the roots."""
    lengths, values = [], np.zeros(0, int)
    length = np.zeros(0, int)
    for level, below in zip(levels[::-1], [None, *levels[:0:-1]], strict=True):
        is_operation = level.n_args > 0
        inside = np.zeros(int(is_operation.sum()), int)
        arguments = np.zeros((len(inside), max_args), int)
        if below is not None:
            inside += np.bincount(below.parent, length, minlength=len(inside)).astype(int)
            arguments[below.parent, below.argument] = values
        length, values = np.ones(len(level.tree), int), level.word.copy()
        length[is_operation] = 2 + inside
        values[is_operation] = _value(
            level.word[is_operation], arguments, level.n_args[is_operation]
        )
        lengths.insert(0, length)
    return lengths, values


def _value(
    operation: Int[np.ndarray, " m"],
    arguments: Int[np.ndarray, "m a"],
    n_args: Int[np.ndarray, " m"],
) -> Int[np.ndarray, " m"]:
    """Minimum, maximum, median or sum modulo 10 of the first `n_args` arguments."""
    given = np.arange(arguments.shape[1]) < n_args[:, None]
    ordered = np.sort(np.where(given, arguments, 10), axis=1)

    def at(rank: np.ndarray) -> np.ndarray:
        return np.take_along_axis(ordered, rank[:, None], axis=1)[:, 0]

    median = (at((n_args - 1) // 2) + at(n_args // 2)) // 2
    total = np.where(given, arguments, 0).sum(axis=1) % 10
    found = np.stack([ordered[:, 0], at(n_args - 1), median, total])
    return np.take_along_axis(found, operation[None], axis=0)[0]


def _written(levels: list[_Level], lengths: list[np.ndarray]) -> UInt8[np.ndarray, " _"]:
    """The tokens of all trees, one after another."""
    tokens = np.zeros(int(lengths[0].sum()), np.uint8)
    begin = np.cumsum(lengths[0]) - lengths[0]
    for i, (level, length) in enumerate(zip(levels, lengths, strict=True)):
        is_operation = level.n_args > 0
        tokens[begin] = level.word + np.where(is_operation, _OPERATIONS, 1)
        begin, end = begin[is_operation] + 1, (begin + length)[is_operation] - 1
        tokens[end] = _CLOSE
        if i + 1 < len(levels):
            below, size = levels[i + 1], lengths[i + 1]
            # Siblings are neighbours, so what is before a node among all nodes below is their sum.
            before = np.cumsum(size) - size
            first = before[below.argument == 0]
            begin = begin[below.parent] + before - first[below.parent]
    return tokens
