"""WMT: sentence pairs of the yearly shared tasks of machine translation.

"Attention Is All You Need" (section 5.1) and "Reformer" (section 5) train on WMT14 English-German,
4.5 million pairs, choose by newstest2013 and report BLEU on newstest2014.
"""

from __future__ import annotations

import functools
import re

from reformax.data import files, tfds_builders
from reformax.data.base import SPLITS
from reformax.data.sentence_pairs import sentence_pairs
from reformax.data.vocabulary import Coverage, ModelType, Pieces, SentencePieces
from reformax.declared import Name, PathName, SettingError, Size, checked
from reformax.shell import user_path
from reformax.task import Task

URL = "https://www.statmt.org/{year}/"
_TFDS_SPLITS = dict(zip(SPLITS, ("train", "validation", "test"), strict=True))
# Datasets whose code comes with tensorflow-datasets. It downloads and runs that of some others.
_NAME = re.compile(r"wmt(\d\d|_t2t)_translate/[a-z]{2}-[a-z]{2}")


@checked
def wmt(
    data_dir: PathName | None = None,
    dataset: Name = "wmt14_translate/de-en",
    source: Name = "en",
    target: Name = "de",
    vocab_size: Pieces = 32_000,
    model_type: ModelType = "unigram",
    character_coverage: Coverage = 0.9995,
    max_sentences: Size = 2_000_000,
) -> Task:
    """Translation between the two languages of a WMT dataset of tensorflow-datasets.

    Args:
      data_dir: the folder where tensorflow-datasets has prepared it. None: TFDS_DATA_DIR or
        ~/tensorflow_datasets, where a missing dataset is downloaded and prepared, which takes an
        hour.
      dataset: the dataset's name and pair of languages, such as 'wmt16_translate/ro-en'.
      source: the language to translate.
      target: the language to translate into.
      vocab_size: pieces of the vocabulary of both languages.
      model_type: 'unigram' or 'bpe'.
      character_coverage: the share of the text's characters that is not unknown.
      max_sentences: the vocabulary is learnt from at most so many, taken evenly from all.

    Raises:
      FileNotFoundError: data_dir does not exist.
      ValueError: the dataset is none of WMT, or has other languages.
      OSError: a split could not be downloaded, prepared or read; raised when it is read.
    """
    if not _NAME.fullmatch(dataset):
        raise SettingError(
            f"dataset={dataset!r} is none of WMT: set a name such as 'wmt14_translate/de-en'"
        )
    if sorted(dataset.partition("/")[2].split("-")) != sorted((source, target)):
        raise SettingError(
            f"dataset={dataset!r} is not of source={source!r} and target={target!r}: set "
            "dataset='wmt14_translate/de-en' or the languages"
        )
    if data_dir is not None and not user_path("data_dir", data_dir).is_dir():
        raise files.Missing(
            f"data_dir={data_dir} is no folder: give the one where tensorflow-datasets keeps "
            f"{dataset}, or leave data_dir out"
        )

    @functools.cache
    def sentences(split: str) -> tuple[list[str], list[str]]:
        return load(dataset, (source, target), split, data_dir)

    def training_text() -> list[str]:
        return [sentence for side in sentences("train") for sentence in side]

    vocabulary = SentencePieces(
        vocab_size, training_text, model_type, character_coverage, max_sentences
    )
    return sentence_pairs(f"{dataset} {source}-{target}", sentences, vocabulary)


def load(
    dataset: str, languages: tuple[str, str], split: str, data_dir: str | None = None
) -> tuple[list[str], list[str]]:
    """The sentences of a split in each language, in the dataset's order.

    Raises:
      ModuleNotFoundError: tensorflow-datasets is not installed.
      OSError: the dataset could not be downloaded, prepared or read.
    """
    tfds_builders.library(dataset, "choose text_pairs.text_pairs for sentences in files")
    url = URL.format(year=dataset.partition("_")[0])
    instead = f"run `tfds build {dataset}` where there is a network and pass --data_dir=its folder"
    make = functools.partial(tfds_builders.builder_of, dataset, data_dir)
    found = tfds_builders.columns(dataset, _TFDS_SPLITS[split], languages, url, instead, make)
    for column in found:  # in place, as the bytes of millions of sentences are much of the memory
        for i, sentence in enumerate(column):
            column[i] = sentence.decode()
    sources, targets = found
    return sources, targets
