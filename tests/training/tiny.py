"""A model and a task small enough to train in a test, with the interfaces of the real ones."""

import os
import time

import jax
import jax.numpy as jnp
import numpy as np

from reformax.data import text
from reformax.task import Batch, Task, TaskModel
from reformax.training.callbacks import Callback


class TinyLM(TaskModel):
    """Predicts a token from the mean of the embeddings of the `width` before it."""

    def __init__(self, mode="train", d_model=8, vocab_size=16, dropout=0.0, max_length=4096):
        self.mode, self.d_model, self.vocab_size = mode, d_model, vocab_size
        self.dropout, self.max_length = dropout, max_length

    def init_params(self, rng, shape):
        del shape
        a, b, c = jax.random.split(rng, 3)
        d, v = self.d_model, self.vocab_size
        return {
            "embedding": 0.5 * jax.random.normal(a, (v, d)),
            "hidden": {"kernel": 0.5 * jax.random.normal(b, (d, d)), "bias": jnp.zeros(d)},
            "head": 0.5 * jax.random.normal(c, (d, v)),
        }

    def features(self, params, tokens, rng=None):
        if tokens.shape[1] > self.max_length:
            raise ValueError(
                f"length={tokens.shape[1]} is above max_length={self.max_length}: raise max_length"
            )
        shifted = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
        x = params["embedding"][shifted]
        x = x + jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        x = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
        if self.mode == "train" and self.dropout:
            x = jnp.where(jax.random.bernoulli(rng, 1 - self.dropout, x.shape), x, 0.0)
        return x

    def logits(self, params, features):
        return features @ params["head"]


def hanging(process=1, step=5):
    """A callback that does not return in one process."""

    def hang(done, values):
        if jax.process_index() == process and done == step:
            time.sleep(1_000)

    return Callback(on_step=hang)


def noted(data_dir, notes):
    """A text; each process notes the rows that it reads, in a file for each step."""
    task = text.text(data_dir)

    def note(step, rows, batch):
        name = f"{step}.{jax.process_count()}.{jax.process_index()}.npz"
        np.savez(os.path.join(notes, name), rows=rows, targets=batch.targets)
        return batch

    def train_batch(seed, step, batch_size, length):
        batch = task.train_batch(seed, step, batch_size, length)
        return note(step, np.arange(batch_size), batch)

    def train_rows(seed, step, batch_size, length, rows):
        return note(step, rows, task.train_rows(seed, step, batch_size, length, rows))

    return task.replace(train_batch=train_batch, train_rows=train_rows)


def counting(
    vocab_size=16,
    n_valid=200,
    noise=0.1,
    data_dir=None,
    poison_step=-1,
    signal_step=-1,
    number=0,
    seconds=0.0,
):
    """Sequences that count up, with noise.

    The batch of `poison_step` has an infinite weight; that of `signal_step` sends this process the
    signal `number`. A batch takes `seconds` to make.
    """
    if data_dir == "empty" or (data_dir == "empty in process 1" and jax.process_index()):
        raise FileNotFoundError(f"no data in data_dir={data_dir}: give the folder that has it")
    split = np.arange(n_valid) % vocab_size

    def train_batch(seed, step, batch_size, length):
        time.sleep(seconds)
        rng = np.random.Generator(np.random.Philox(key=[seed, step]))
        start = rng.integers(vocab_size, size=(batch_size, 1))
        tokens = (start + np.arange(length)) % vocab_size
        tokens = np.where(rng.random(tokens.shape) < noise, 0, tokens).astype(np.int32)
        weights = np.ones(tokens.shape, np.float32)
        if step == signal_step:
            os.kill(os.getpid(), number)
        if step == poison_step:
            weights[0, 0] = np.inf
        return Batch(tokens, tokens, weights)

    def eval_batches(name, batch_size, length, stride):
        del name
        windows = []
        for end in range(min(length, n_valid), n_valid + stride, stride):
            done = 0 if not windows else windows[-1][1]
            end = min(end, n_valid)
            if end > done:
                windows.append((done, end))
        for first in range(0, len(windows), batch_size):
            tokens = np.zeros((batch_size, length), np.int32)
            weights = np.zeros((batch_size, length), np.float32)
            for row, (done, end) in enumerate(windows[first : first + batch_size]):
                begin = max(end - length, 0)
                tokens[row, : end - begin] = split[begin:end]
                weights[row, done - begin : end - begin] = 1
            yield Batch(tokens, tokens, weights)

    n_targets = dict.fromkeys(("train", "valid", "test"), n_valid)
    return Task("counting", vocab_size, train_batch, eval_batches, n_targets.__getitem__)
