"""Whether one paper cites another, by the bytes of both: Long Range Arena's document retrieval.

Radev et al. 2013, "The ACL anthology network corpus"; Tay et al. 2020, "Long Range Arena", section
2.2.3, cut papers to 4,000 bytes. No download is made: the files are those that Long Range Arena
publishes, or any in their format.
"""

from __future__ import annotations

import csv

from reformax.data import files, tables
from reformax.data.labelled import stored_task
from reformax.declared import Name, PathName, SettingError, checked
from reformax.task import Labels, Task

# The column of the label, and those of the two texts.
_LABEL, _TEXTS, _N_COLUMNS = 0, (3, 4), 5


@checked
def document_pairs(
    data_dir: PathName,
    train: Name = "new_aan_pairs.train.tsv",
    valid: Name = "new_aan_pairs.eval.tsv",
    test: Name = "new_aan_pairs.test.tsv",
) -> Task:
    """Name whether two documents belong together, class 1, or not, class 0.

    A line has five fields with tabs between them: the label, 0 or 1, the names of both documents
    and their texts. A quotation mark is a letter like others, as Long Range Arena reads it. A token
    is a byte plus 1; what is longer than a batch is cut.

    Args:
      data_dir: the folder of the files.
      train: the name of the file of 'train'.
      valid: that of 'valid'.
      test: that of 'test'.

    Raises:
      FileNotFoundError: data_dir, or a file when it is read, does not exist.
      ValueError: a file is no UTF-8, or a line is not such; raised when it is read.
    """
    folder = files.existing(data_dir)
    names = {"train": train, "valid": valid, "test": test}

    def read(split: str) -> tuple[list[tuple[bytes, bytes]], list[int]]:
        path = folder / names[split]
        if not path.is_file():
            raise files.Missing(
                f"{path} does not exist: put it there, or set document_pairs.document_pairs."
                f"{split} to the name of yours"
            )
        pairs, classes = [], []
        rows = tables.delimited_rows(path, "\t", csv.QUOTE_NONE)
        for number, fields in enumerate(rows, start=1):
            if len(fields) != _N_COLUMNS or fields[_LABEL] not in ("0", "1", "0.0", "1.0"):
                raise SettingError(
                    f"{path} row {number:,}: expected a label, 0 or 1, two names and two texts, "
                    "with tabs between them"
                )
            pairs.append(tuple(fields[column].encode() for column in _TEXTS))
            classes.append(int(float(fields[_LABEL])))
        return pairs, classes

    return stored_task("document_pairs", vocab_size=257, labels=Labels(2, pairs=True), read=read)
