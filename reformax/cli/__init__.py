"""The commands of `reformax`, each a module with `main`, and what they share.

Where to look:

* Commands: `train`, `evaluate`, `generate`, `prepare`, `runs`, `sweep`, `configs`.
* A gin config: `config` parses files and overrides, by `statements` and `reading`; `parsed` says
  what was parsed. `modules`, `short_names` and `typed` find what a name means. `trust` says which
  names the config of a run's folder may hold; `trax_config` recognises configs of Trax.
* Flags and errors: `flags`, `distributed`, `errors`, `messages`.
* A trained run: `saved_run` reads it. `hash_counts`, `task_scores` and `lm_eval` score it, and
  `results` writes the scores.
* Generation: `prompts` reads, `generated_text` and `translations` write.
* The end of a script: `report`, `terminal_curve`.
"""
