"""Candidates: the keys whose scores an indexer computes, where it does not compute all.

The indexer scores the candidates exactly, so that candidates that cover all keys leave its choice
as it is. Later tokens change no query's candidates in a causal call. A file has one way to find
candidates, and `base.py` what all of them define.
"""

from reformax.ops.indexing.candidates.base import Candidates
from reformax.ops.indexing.candidates.clustered import Clustered
from reformax.ops.indexing.candidates.coded import Coded
from reformax.ops.indexing.candidates.hashed import Hashed
from reformax.ops.indexing.candidates.pooled import Pooled

__all__ = ["Candidates", "Clustered", "Coded", "Hashed", "Pooled"]
