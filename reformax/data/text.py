"""Any text: a file, or the files of a folder."""

from __future__ import annotations

from typing import Annotated

from reformax.data import files
from reformax.data.base import Task, byte_language_model, split_bytes
from reformax.declared import Bounds, Name, PathName, checked

Offset = Annotated[int, Bounds(0, 2**16 - 1)]


@checked
def text(data_dir: PathName, pattern: Name = "*", offset: Offset = 0) -> Task:
    """A byte language model of your own text, split 90/5/5 by bytes.

    Args:
      data_dir: a file, plain or .gz, .xz or .zip, or a folder. The files of a folder are joined in
        the order of their relative paths, with a newline after a file that ends without one. Hidden
        files and folders are left out.
      pattern: the names of a folder's files to take, such as '*.txt' or '*.md'.
      offset: a byte's id is the byte plus this, for models that reserve the first ids.

    Raises:
      FileNotFoundError: data_dir does not exist.
      OSError: a file or a folder below cannot be read.
      ValueError: the text is empty, damaged, too short or too long, or no file matches, or one is a
        FIFO, a device or a socket. Text is too long above half of the machine's memory; packed text
        also above 1 GiB and 20 times its packed size.
    """
    path = files.existing(data_dir)
    data = files.read_folder(path, pattern) if path.is_dir() else files.read_file(path)
    return byte_language_model("text", split_bytes(files.as_array(data), str(path)), offset)
