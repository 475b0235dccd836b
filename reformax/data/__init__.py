"""Sources of tokens: one file each, with a factory of the same name.

A factory returns a `reformax.task.Task` and reads the data once. NumPy alone makes the
batches; neither TensorFlow nor JAX is imported.

Where to look for what the sources share:

* A text: `documents` reads what a user names, by `splits`, `files`, `tables` and `arrow_tables`.
  `base` makes its task, `windows` and `draws` its batches, `lengths` and `joined` its documents.
* Pieces of words: `pieces` encodes by a `vocabulary` of `piece_codecs` or `sentencepieces`.
* Texts of any size: `token_files` and `piece_files` on disk, read by `stored`, kept in `cache`.
* Examples: `labelled` for classes, `drawn` and `blocks` for synthetic ones, `packing` in rows.
"""
