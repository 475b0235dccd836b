"""Scores of translations: sacreBLEU (Post 2018), and the share of exact matches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def score(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Scores translations against references.

    Args:
      hypotheses: translations as detokenized text.
      references: one for each.

    Returns:
      bleu and bleu_uncased, from 0 to 100; bleu_signature and bleu_uncased_signature, which say how
      they were computed; and exact, the share of hypotheses that equal their reference.
    """
    from sacrebleu.metrics import BLEU  # half a second, and only where there is text to score

    result: dict[str, Any] = {}
    for name, lowercase in (("bleu", False), ("bleu_uncased", True)):
        metric = BLEU(lowercase=lowercase)
        result[name] = metric.corpus_score(list(hypotheses), [list(references)]).score
        result[f"{name}_signature"] = str(metric.get_signature())
    same = [h == r for h, r in zip(hypotheses, references, strict=True)]
    return result | {"exact": sum(same) / len(same)}
