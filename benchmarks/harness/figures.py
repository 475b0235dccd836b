"""Figures in a file: a line of JSON for each command that measured some, with what it ran on.

A figure is *stale* once the files that it measures have changed since the commit that it is of.
"""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import lines
from benchmarks.harness.processes import ROOT

PACKAGES = ("reformax", "jax", "jaxlib", "torch", "transformers")


class Part(NamedTuple):
    """Figures that one command measures."""

    command: str  # a module of benchmarks and its flags
    measures: tuple[str, ...]  # files and folders of the repository


class Figures(NamedTuple):
    """What a part printed, and where and when."""

    part: str
    command: str
    measures: list[str]
    commit: str | None  # None outside of a checkout
    changed: bool  # whether the checkout was not of a commit alone
    date: str  # UTC
    seconds: float
    hardware: str
    versions: dict[str, str]
    tables: list[dict[str, Any]]  # title, columns and rows of each

    def stale(self) -> str | None:
        """Why the figures may no longer hold; None if nothing that they measure has changed."""
        if self.commit is None or self.changed:
            return "of files that no commit has"
        since = git("log", "--oneline", f"{self.commit}..HEAD", "--", *self.measures)
        if since is None:
            return f"of commit {self.commit[:9]}, which is not in this repository"
        n_changes = len(since.splitlines())
        changes = "1 change" if n_changes == 1 else f"{n_changes} changes"
        return f"older than {changes} of what they measure" if n_changes else None


def read(path: Path) -> dict[str, Figures]:
    """The figures in a file by their part, the last of each; none if there is no file."""
    found = (Figures(**line) for line in lines.read(path))
    return {figures.part: figures for figures in found}


def tables(path: Path) -> list[dict[str, Any]]:
    """The tables whose rows `harness.output` wrote to a file."""
    found: list[dict[str, Any]] = []
    for data in lines.read(path):
        if "columns" in data:
            found.append(data | {"rows": []})
        else:
            found[-1]["rows"].append(data["cells"])
    return found


def versions() -> dict[str, str]:
    """Of Python, and of the packages that a benchmark measures, as far as they are installed."""
    known = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            known[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return known


def git(*arguments: str) -> str | None:
    """What git says about the repository; None where it cannot."""
    try:
        found = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return None if found.returncode else found.stdout.strip()
