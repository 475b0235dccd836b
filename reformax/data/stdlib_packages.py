"""Which package of Python's standard library a stretch of source text is from, by its bytes.

A task of long rows and real text that every machine has, in the place of Long Range Arena's reviews
where there is no download.
"""

from __future__ import annotations

import functools
from typing import Annotated

import numpy as np
from jaxtyping import Int

from reformax.data import files
from reformax.data.base import SPLITS, fingerprint, split_bytes
from reformax.data.labelled import labelled_task
from reformax.data.rng import philox
from reformax.data.stdlib import library_files
from reformax.declared import Bounds, Seed, SettingError, Size, checked
from reformax.task import Labels, Task

Classes = Annotated[int, Bounds(2)]


@checked
def stdlib_packages(
    chunk_len: Size = 1024,
    n_classes: Classes = 8,
    n_train: Size = 100_000,
    n_eval: Size = 2_000,
    data_seed: Seed = 0,
) -> Task:
    """Name the package that `chunk_len` consecutive bytes are from, among the largest ones.

    Packages are the library's folders without its own tests, `test`. The text of each is split
    90/5/5 by bytes, its files in the order of their paths, so that held-out files, but for one at a
    border, are not trained on. A token is a byte plus 1. Example i is of class i % n_classes, at a
    position that is a function of (data_seed, split, i). Figures depend on the Python that runs.

    Args:
      chunk_len: bytes of an example.
      n_classes: packages; the largest of them.
      n_train: examples to train on.
      n_eval: examples of 'valid' and of 'test'.
      data_seed: another one makes another set.

    Raises:
      FileNotFoundError: this Python has its library in an archive, or has none.
      ValueError: there are fewer packages, or a held-out split of one is shorter than an example.
    """
    texts = _largest(n_classes)
    splits = {name: split_bytes(text, name) for name, text in texts.items()}
    for name, parts in splits.items():
        if chunk_len > len(parts["test"]):
            raise SettingError(
                f"chunk_len={chunk_len} must be at most {len(parts['test'])}, the bytes of the "
                f"package {name} that are held out: set it or n_classes lower"
            )

    def examples(split: str, numbers: Int[np.ndarray, " n"]):
        classes = numbers % n_classes
        rows = []
        for number, which in zip(numbers, classes, strict=True):
            text = splits[names[which]][split]
            rng = philox(2**63 + data_seed, 2**32 * SPLITS.index(split) + int(number))
            first = int(rng.integers(len(text) - chunk_len + 1))
            rows.append(text[first : first + chunk_len])
        return np.stack(rows).astype(np.int32) + 1, classes

    @functools.cache
    def made_by(split: str) -> str:
        text = fingerprint(np.concatenate([parts[split] for parts in splits.values()]))
        settings = f"chunk_len={chunk_len}, data_seed={data_seed}"
        return f"{sizes[split]} examples of {', '.join(names)}, {text}, {settings}"

    names, sizes = list(texts), {"train": n_train, "valid": n_eval, "test": n_eval}
    return labelled_task(
        "stdlib_packages",
        vocab_size=257,
        labels=Labels(n_classes),
        sizes=sizes,
        examples=examples,
        made_by=made_by,
        longest=chunk_len,
    )


def _largest(n: int) -> dict[str, np.ndarray]:
    """The text of the `n` largest packages, in the order of their names."""
    folder, paths = library_files()
    of_package: dict[str, list] = {}
    for path in paths:
        first, *rest = path.relative_to(folder).parts
        if rest and first != "test":
            of_package.setdefault(first, []).append(path)
    texts = {
        name: files.join(path.read_bytes() for path in inside).data
        for name, inside in of_package.items()
    }
    if n > len(texts):
        raise SettingError(
            f"n_classes is {n}: expected at most {len(texts)}, the packages of {folder}"
        )
    largest = sorted(texts, key=lambda name: len(texts[name]))[-n:]
    return {name: texts[name] for name in sorted(largest)}
