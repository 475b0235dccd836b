"""Pallas kernels for NVIDIA GPUs, compiled by Triton.

Where to look:

* Softmax attention is the bodies of `flash` over a program, which says what is visited and seen:
  of tiles (`block_sparse`, `block_programs`), of chunks in any order (`chunked`, `chunk_programs`),
  of blocks (`moba`, `nsa`, with `group_rows`), of listed keys (`listed`).
* Attentions made of these: `band`, `clusters`, `chosen_keys`, `compressed`.
* Choices of keys: `indexer` and `candidate_scores` by `top_k`, `indexer_gradient`, `moba_choice`,
  `nsa_selection`.
* Recurrences: `recurrence`, of `recurrence_states`, `recurrence_outputs` and `recurrence_chunk`.
* Others: `angular_hash`, `packed_chunks`, `random_features`, and `one_query` to decode.

`common` has reads and writes of tiles, products and launches.
"""
