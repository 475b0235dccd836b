"""Rows in processes, ours and peers: they compile side by side, and are timed alone in turn."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.kept import Figures
from benchmarks.harness.processes import Answer, ask_each, together

Start = Callable[[], Iterator[Answer]]  # of a process


class Peers(NamedTuple):
    """What others have written.

    Attributes:
      of: our row that each one computes too, by name.
      compilers: how many processes compile each one.
      compile: starts one of them, by name and index. It compiles its share, and checks the peer.
      time: starts a process that times several, one after another, at the lengths of each name.
    """

    of: Mapping[str, str]
    compilers: Mapping[str, int]
    compile: Callable[[str, int], Iterator[Answer]]
    time: Callable[[Mapping[str, Sequence[int]]], Iterator[Answer]]


class Rows(NamedTuple):
    """What is measured.

    Attributes:
      numbers: start what writes the arrays that rows are checked against.
      ours: start our rows, by name.
      peers: of those that something is missing of.
      lengths: of the rows; what the figures have of them is not measured again.
    """

    numbers: Mapping[str, Start]
    ours: Mapping[str, Start]
    peers: Peers
    lengths: Sequence[int]


def measure(
    rows: Rows,
    figures: Figures,
    folder: Path,
    keep: Callable[[str, str | None, int, Answer], None],
    at_once: int | None = None,
) -> None:
    """Nothing is timed before all peers are compiled; then each row, and all peers, are alone.

    Args:
      rows: what is measured.
      figures: what is known.
      folder: of the file `lock`, and of `{name}.failed`, which says why a peer or numbers failed.
      keep: is told each figure, or why there is none, by the name, our row's name and the length.
      at_once: processes that run side by side; None: as many as there are processors.
    """
    peers = rows.peers
    compilers = {
        (index, peer): functools.partial(peers.compile, peer, index)
        for peer in peers.of
        for index in range(peers.compilers[peer])
    }

    def missing(name: str) -> list[int]:
        return [length for length in figures.missing(name) if length in rows.lengths]

    def fail(name: str, answer: Answer) -> None:
        for length in missing(name):
            keep(name, peers.of.get(name), length, answer)

    asked: dict[tuple[Any, str], Start] = {("numbers", n): x for n, x in rows.numbers.items()}
    asked |= compilers
    if peers.of:
        of_peers = {peer: missing(peer) for peer in peers.of}
        asked["times", ""] = functools.partial(_times, peers, of_peers, folder)
    asked |= {("ours", name): start for name, start in rows.ours.items()}
    wrong: dict[tuple[Any, str], bool] = {}  # of compilers that have answered
    with ExitStack() as compiling:
        if compilers:
            compiling.enter_context(together(folder / "lock"))
        for (kind, name), answer in ask_each(asked, at_once or os.cpu_count() or 1):
            if kind == "numbers":
                (folder / f"{name}.failed").write_text(answer["error"])
            elif kind == "ours" and "length" not in answer:
                fail(name, answer)
            elif kind in ("ours", "times"):
                keep(answer["name"], answer.get("of"), answer["length"], answer)
            else:
                wrong.setdefault((kind, name), "error" in answer)
                of_peer = [x for (_, peer), x in wrong.items() if peer == name]
                if len(of_peer) == peers.compilers[name] and all(of_peer):
                    (folder / f"{name}.failed").write_text(answer["error"])
                    fail(name, answer)
                if len(wrong) == len(compilers):
                    compiling.close()


def _times(peers: Peers, missing: dict[str, list[int]], folder: Path) -> Iterator[Answer]:
    """The figures of peers, one after another; a process for those after one that hangs."""
    while missing:
        killed = {"error": "no answer"}
        for answer in peers.time(missing):
            if "name" in answer:
                missing[answer["name"]].remove(answer["length"])
                yield answer
            else:
                killed = answer
        # Those that could not be compiled are recorded already.
        missing = {
            peer: lengths
            for peer, lengths in missing.items()
            if lengths and not (folder / f"{peer}.failed").exists()
        }
        for peer in list(missing)[:1]:  # the one that the process has ended in
            for length in missing.pop(peer):
                yield {"name": peer, "of": peers.of[peer], "length": length} | killed
