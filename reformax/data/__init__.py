"""Sources of tokens: one file each, with a factory of the same name.

A factory returns a `reformax.task.Task` and reads the data once. NumPy alone makes the
batches; neither TensorFlow nor JAX is imported.

| data | factories |
| --- | --- |
| one text | `text`, `enwik8`, `stdlib`, `package_sources`, `token_ids`, `images` |
| of other tasks | `mixture` of texts, `in_context` (questions within a text), `masked` tokens |
| conversations | `chats`, by `conversations` (rows to turns), `chat_templates` (to tokens) |
| sentence pairs | `text_pairs`, `wmt`, `reverse`; `sentence_pairs` packs them |
| labels | `labelled_text`, `reviews`, `cifar10`, `document_pairs`, `listops`, `pathfinder`, ... |
| synthetic | `duplication`, `associative_recall` |

What they share, from a path to a batch:

1. `files` reads and unpacks bytes, `tables` and `arrow_tables` rows. `splits` knows a folder's own.
2. `documents` makes a text of them, in memory. `token_files` does it in files (`shard_folders`), by
   `workers`; `stored` reads such files, `cache` prunes them. `joined` joins short documents.
3. `pieces` encodes by a vocabulary (`piece_codecs`, `sentencepieces`), `piece_files` in files.
4. `base` makes the task of a text: `windows`, `lengths` and `rng` say where its windows begin.
   `labelled` makes that of classes, `synthetic` and `synthetic_blocks` those of examples that are
   drawn; `packing` fills rows.
"""
