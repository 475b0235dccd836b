"""Scores of translations: sacreBLEU (Post 2018), and how many are the reference itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def score(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Scores of a split, with what says how they were made.

    Args:
      hypotheses: translations as text, as a reader gets them.
      references: one of each.

    Returns:
      bleu and bleu_uncased, of 100, each with its signature, bleu_signature and
      bleu_uncased_signature; and exact, the share of hypotheses that are their reference.
    """
    from sacrebleu.metrics import BLEU  # half a second, and only where there is text to score

    result: dict[str, Any] = {}
    for name, lowercase in (("bleu", False), ("bleu_uncased", True)):
        metric = BLEU(lowercase=lowercase)
        result[name] = metric.corpus_score(list(hypotheses), [list(references)]).score
        result[f"{name}_signature"] = str(metric.get_signature())
    same = [h == r for h, r in zip(hypotheses, references, strict=True)]
    return result | {"exact": sum(same) / len(same)}
