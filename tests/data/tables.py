"""Tables and token files as the tests of data make and compare them."""

import csv
import gzip
import io
import json
import lzma

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers


def zst(data):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as file:
        file.write(data)
    return sink.getvalue().to_pybytes()


PACK = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zst}


def write(path, rows):
    """Writes rows, dicts of the same fields, by the path's ending; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.suffixes[-2] if path.suffix in PACK else path.suffix
    if kind == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif kind == ".arrow":
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(str(path), table.schema) as sink:
            sink.write_table(table)
    else:
        data = "".join(f"{json.dumps(row)}\n\n" for row in rows)
        if kind == ".json":
            data = json.dumps(rows)
        if kind in (".csv", ".tsv"):
            file = io.StringIO(newline="")
            table = csv.DictWriter(file, list(rows[0]), delimiter="," if kind == ".csv" else "\t")
            table.writeheader()
            table.writerows(rows)
            data = file.getvalue()
        path.write_bytes(PACK.get(path.suffix, bytes)(data.encode()))
    return path


def write_texts(path, texts):
    return write(path, [{"text": text} for text in texts])


def prepare_dataset(name, folder, file_format, examples, **options):
    """Writes a dataset of tensorflow-datasets as its own builder does, without the download."""
    import tensorflow_datasets as tfds

    builder = tfds.builder_cls(name)

    class Local(builder, skip_registration=True):
        name = builder.name
        url_infos = {}

        def _split_generators(self, *_):
            return {split: iter(enumerate(rows)) for split, rows in examples.items()}

    Local(data_dir=str(folder), file_format=file_format, **options).download_and_prepare()


def tokenizer_json(path, sentences, *special, lower=False, size=400):
    """Writes a byte-level BPE as GPT-2 has, with these special tokens; returns the path."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if lower:
        made.normalizer = normalizers.Lowercase()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    made.train_from_iterator(sentences, trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    made.save(str(path))
    return path


def _batches(task, length):
    yield task.train_batch(3, 5, 7, length)
    yield task.train_rows(3, 6, 7, length, np.array([1, 4]))
    for split in ("train", "valid", "test"):
        yield from task.eval_batches(split, 4, length, length // 2 + 20)


def arrays(batch):
    return [x for field in batch for x in (field if isinstance(field, tuple) else [field])]


def assert_alike(one, other, length=300):
    """Two tasks have the same fingerprints, sizes, borders and batches, bit for bit."""
    for split in ("train", "valid", "test"):
        assert one.fingerprint(split) == other.fingerprint(split)
        assert one.n_targets(split) == other.n_targets(split)
        assert (one.borders is None) == (other.borders is None)
        if one.borders is not None:
            assert np.array_equal(one.borders(split), other.borders(split))
    for a, b in zip(_batches(one, length), _batches(other, length), strict=True):
        for x, y in zip(arrays(a), arrays(b), strict=True):
            assert x.dtype == y.dtype and np.array_equal(x, y)
