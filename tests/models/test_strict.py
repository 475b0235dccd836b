"""Models under JAX's strict promotion: no dtype and no rank is promoted in silence."""

import jax
import numpy as np
import pytest

from reformax import generation
from reformax.data import duplication, reverse
from reformax.training import evaluation, mesh, optimizer, step
from tests.layers import plain
from tests.models.test_x64 import MODELS, SIZES, models

RNG = jax.random.PRNGKey(4)
LENGTH = 16
# The other models have the other positions.
MORE = {
    "transformer_lm": dict(
        pos_type="axial", pos_axial_shape=(8, 8), pos_d_axial_embs=(4, 4), attention_bias=True
    )
}


def task_of(options):
    if "input_vocab_size" in options:
        return reverse.reverse(max_symbols=6, n_eval=2)
    return duplication.duplication(length=LENGTH, n_eval=2)


@pytest.mark.slow
@models
def test_training_evaluation_and_generation(name):
    """A step of training is traced, which shows all types. Optax's own arithmetic is left out."""
    constructor, options = MODELS[name]
    task = task_of(options)
    size = next(key for key in options if key.endswith("vocab_size"))
    options = SIZES | options | MORE.get(name, {}) | {size: task.vocab_size}
    model = constructor(**options, dropout=0.1, attention_dropout=0.1, dtype="bfloat16")
    adam, batch = optimizer.adam(), tuple(task.train_batch(0, 0, 2, LENGTH))
    run = step.step_fn(
        model,
        adam,
        mesh.make(devices=jax.devices()[:1]),
        accumulate=2,
        loss_chunk_len=5,
        label_smoothing=0.1,
        ema_decay=0.9,
    )
    evaluated = constructor(**options, mode="eval")
    translates = task.translation is not None
    params = plain.init(evaluated, *[(2, LENGTH)] * (1 + translates))
    tokens = np.random.default_rng(0).integers(3, 11, (2, 13)).tolist()
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        state = jax.eval_shape(step.init_fn(model, adam, (2, LENGTH), ema=True), RNG)
        run.lower(state, batch, RNG)
        scored = evaluation.evaluate(evaluated, params, task, batch_size=2, length=LENGTH)
        assert scored["n_targets"] == task.n_targets("valid")
        if translates:
            for beam_size in (1, 2):
                generation.translate(evaluated, params, tokens, beam_size=beam_size, end=1)
        else:
            generation.generate(evaluated, params, tokens, 4, temperature=0.7)
