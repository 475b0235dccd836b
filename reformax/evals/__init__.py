"""Scores language models by questions: likelihoods of answers, and continuations.

`likelihood.py` and `generate_until.py` answer the three requests of lm-evaluation-harness, and
`harness.py` is its model. `in_context.py` scores the tasks of `reformax.data.questions`. Nothing
here imports the harness when it is imported itself.
"""
