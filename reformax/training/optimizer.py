"""Optimizers and learning-rate schedules over optax, as factories that gin configures.

A schedule counts updates from 0 and warms up from 1, so that the first update has a rate above
zero. All of these optimizers have an attribute `learning_rate`, their schedule; a run records its
value.

A schedule is as long as its run, unless it is given `steps`: `build(optimizer, num_train_steps)`
is the optimizer of a run of so many steps. `loop.train` calls it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from reformax.declared import (
    Count,
    Fraction,
    NonNegative,
    Pattern,
    Positive,
    Rate,
    SettingError,
    Size,
    checked,
)
from reformax.training.learning_rates import (
    LearningRate,
    RateSchedule,
    check_schedule,
    rising,
    steps_in,
)
from reformax.training.muon_matrices import (
    MATRICES,
    READOUTS,
    axes_of_matrix,
    groups,
    rates_by_width,
    times,
)
from reformax.training.named_tensors import n_axes_of, name_of

# Weight decay is for matrices of linear maps, not for norms, biases, embeddings and positions.
# Names decide, because a scanned stack gives all tensors one more axis.
NO_DECAY = r"norm|bias|scale|embed|position|next_value|(^|\.)b(\d|_\w+)?$"


class Optimizer(optax.GradientTransformationExtraArgs):
    """A transformation of gradients with the schedules of its learning rates.

    Attributes:
      learning_rate: the first schedule, which lines of a run show.
      schedules: all of them.
      of_rates: schedules -> the transformation.
      reads: a tree of gradients -> those that it uses, with None for others.
      width: the `d_model` that its rates are for; None: any.
    """

    learning_rate: optax.Schedule
    schedules: tuple[optax.Schedule, ...] = ()
    of_rates: Callable[..., optax.GradientTransformation]
    reads: Callable = staticmethod(lambda gradients: gradients)
    width: int | None = None


def check_width(optimizer: optax.GradientTransformation, model: Any) -> None:
    """Raises `SettingError` for an optimizer of models of another width than this one's."""
    width, d_model = getattr(optimizer, "width", None), getattr(model, "d_model", None)
    if None not in (width, d_model) and width != d_model:
        raise SettingError(f"width is {width}: expected that of the model, d_model={d_model}")


def build(
    optimizer: optax.GradientTransformation, num_train_steps: int
) -> optax.GradientTransformation:
    """The optimizer of a run of `num_train_steps`; one that needs no length is itself."""
    if not _schedules(optimizer):
        return optimizer
    built = [
        x.build(num_train_steps) if isinstance(x, RateSchedule) else x for x in optimizer.schedules
    ]
    return scheduled(built, optimizer.of_rates)


def unfinished_warmup(optimizer: optax.GradientTransformation, num_train_steps: int) -> str | None:
    """That of the first of an optimizer's schedules that has one, or None."""
    lines = (x.unfinished_warmup(num_train_steps) for x in _schedules(optimizer))
    return next(filter(None, lines), None)


def schedule_steps(optimizer: optax.GradientTransformation) -> int | None:
    """The length of a built optimizer's schedule; None for one without, or without an end."""
    return next((x.steps for x in _schedules(optimizer) if not x.endless), None)


def _schedules(optimizer: optax.GradientTransformation) -> list[RateSchedule]:
    """The optimizer's schedules whose length may be that of the run."""
    given = optimizer.schedules if isinstance(optimizer, Optimizer) else ()
    return [x for x in given if isinstance(x, RateSchedule)]


@checked
def rsqrt(constant: Positive = 0.1, warmup_steps: Size = 400) -> optax.Schedule:
    """Trax's `constant * linear_warmup * rsqrt_decay`: it peaks at constant / sqrt(warmup_steps).

    From Attention Is All You Need, section 5.3, where constant = d_model ** -0.5.
    """

    def rate(count, steps):
        del steps  # it ends nowhere
        step = count + 1.0
        return constant * rising(step, warmup_steps) / jnp.sqrt(jnp.maximum(step, warmup_steps))

    return RateSchedule("rsqrt", rate, warmup_steps, endless=True)


@checked
def cosine(
    max_value: Positive = 1e-3,
    steps: Size | None = None,
    warmup_steps: Count = 100,
    final_fraction: Fraction = 0.1,
) -> optax.Schedule:
    """Linear warm-up to `max_value`, then half a cosine to `final_fraction` of it at `steps`.

    From SGDR (Loshchilov & Hutter, 2017), equation 5, without restarts; constant after `steps`.
    `steps` None are those of the run.
    """
    if steps is not None and warmup_steps >= steps:
        raise SettingError(
            f"cosine.warmup_steps={warmup_steps} must be below cosine.steps={steps}, or nothing "
            f"of the cosine is left: set cosine.warmup_steps={min(steps // 10, warmup_steps)}"
        )

    def rate(count, steps):
        step = count + 1.0
        progress = jnp.clip((step - warmup_steps) / max(steps - warmup_steps, 1), 0.0, 1.0)
        decay = final_fraction + (1 - final_fraction) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        return max_value * rising(step, warmup_steps) * decay

    return RateSchedule("cosine", rate, warmup_steps, steps)


@checked
def trapezoid(
    max_value: Positive = 1e-3,
    steps: Size | None = None,
    warmup_steps: Count = 100,
    decay_fraction: Fraction = 0.25,
    final_fraction: Fraction = 0.0,
) -> optax.Schedule:
    """Linear warm-up to `max_value`, then a line down to `final_fraction` of it after `steps`.

    From Hägele et al. 2024, "Scaling Laws and Compute-Optimal Training Beyond Fixed Training
    Durations", section 3: between them the rate stays, until the last `decay_fraction` of the
    steps; 0 leaves the line out. It suits runs in stages, of which each is learnt at the same rate.
    `steps` None are those of the run.
    """

    falling = functools.partial(steps_in, decay_fraction)
    if steps is not None and warmup_steps + falling(steps) > steps:
        raise SettingError(
            f"trapezoid.warmup_steps={warmup_steps} and decay_fraction={decay_fraction} overlap in "
            f"steps={steps}: lower one of them"
        )

    def rate(count, steps):
        n = falling(steps)
        left = jnp.clip((steps - count) / (n + 1), 0.0, 1.0) if n else 1.0
        decay = final_fraction + (1 - final_fraction) * left
        return max_value * rising(count + 1.0, warmup_steps) * decay

    return RateSchedule("trapezoid", rate, warmup_steps, steps, falling)


@checked
def adam(
    learning_rate: LearningRate = 1e-3,
    b1: Rate = 0.9,
    b2: Rate = 0.98,
    eps: NonNegative = 1e-9,
    clip: Positive | None = None,
) -> Optimizer:
    """Adam (Kingma & Ba, 2015), with the b2 and eps of Attention Is All You Need, section 5.3.

    Args:
      learning_rate: a number, or a schedule such as `@optimizer.rsqrt()`.
      b1: decay of the mean of gradients.
      b2: decay of the mean of their squares.
      eps: added to the root of the latter.
      clip: largest global norm of the gradient; a larger gradient is scaled down to it. None for no
        clipping.
    """
    return _optimizer(learning_rate, clip, lambda rate: optax.adam(rate, b1, b2, eps))


@checked
def adamw(
    learning_rate: LearningRate = 1e-3,
    b1: Rate = 0.9,
    b2: Rate = 0.98,
    eps: NonNegative = 1e-8,
    weight_decay: NonNegative = 0.1,
    clip: Positive | None = 1.0,
    no_decay: Pattern = NO_DECAY,
) -> Optimizer:
    """AdamW (Loshchilov & Hutter, 2019), algorithm 2: each step also shrinks the matrices.

    Args:
      learning_rate: a number, or a schedule such as `@optimizer.cosine()`.
      b1: decay of the mean of gradients.
      b2: decay of the mean of their squares.
      eps: added to the root of the latter.
      weight_decay: times the learning rate, the fraction a matrix shrinks by in a step.
      clip: as in `adam`.
      no_decay: a regular expression. A tensor is not shrunk if it is found in the tensor's name
        (any case), or if the tensor has fewer than two axes; the depth of a stack is none.
    """
    options = dict(weight_decay=weight_decay, mask=_decay_mask(no_decay))
    return _optimizer(learning_rate, clip, lambda rate: optax.adamw(rate, b1, b2, eps, **options))


@checked
def adafactor(
    learning_rate: LearningRate = 1e-2,
    decay_rate: Positive = 0.8,
    momentum: Rate | None = None,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: Positive | None = 1.0,
    min_dim_size_to_factor: Size = 128,
    weight_decay: NonNegative = 0.0,
    clip: Positive | None = None,
    no_decay: Pattern = NO_DECAY,
) -> Optimizer:
    """Adafactor (Shazeer & Stern, 2018), algorithms 4 and 5: row and column means of squares.

    Args:
      learning_rate: relative to each tensor's own size if `multiply_by_parameter_scale`.
      decay_rate: of the mean of squares, whose decay at step t is 1 - t ** -decay_rate (7.2).
      momentum: decay of the mean of updates; None for none, which saves a copy of the parameters.
      multiply_by_parameter_scale: whether steps are relative to the tensor's size (section 8).
      clipping_threshold: largest root mean square of a tensor's update (section 6), or None.
      min_dim_size_to_factor: tensors with a smaller axis keep their whole square.
      weight_decay: the fraction a matrix shrinks by in a step.
      clip: as in `adam`.
      no_decay: as in `adamw`.
    """
    # optax.adafactor does not scale its weight_decay_rate by the learning rate.
    return _optimizer(
        learning_rate,
        clip,
        lambda rate: optax.adafactor(
            rate,
            min_dim_size_to_factor=min_dim_size_to_factor,
            decay_rate=decay_rate,
            multiply_by_parameter_scale=multiply_by_parameter_scale,
            clipping_threshold=clipping_threshold,
            momentum=momentum,
            weight_decay_rate=weight_decay or None,
            weight_decay_mask=_decay_mask(no_decay),
        ),
    )


@checked
def muon(
    learning_rate: LearningRate = 1e-3,
    adam_learning_rate: LearningRate | None = None,
    momentum: Rate = 0.95,
    n_iterations: Size = 5,
    rms: Positive | None = 0.2,
    weight_decay: NonNegative = 0.1,
    b1: Rate = 0.9,
    b2: Rate = 0.98,
    eps: NonNegative = 1e-8,
    momentum_dtype: Literal["float32", "bfloat16"] = "float32",
    clip: Positive | None = 1.0,
    matrices: Pattern = MATRICES,
    no_decay: Pattern = NO_DECAY,
    width: Size | None = None,
    base_width: Size | None = None,
) -> Optimizer:
    """Muon for the matrices of a stack, and AdamW for all else (Jordan et al. 2024, "Muon").

    A matrix moves along its Nesterov momentum, made nearly orthogonal by a quintic Newton-Schulz
    iteration. A projection of all heads is one matrix. Embeddings, norms, biases, positions, the
    algorithms' own weights and a model's heads are `adamw`'s.

    A matrix of m x n, m at most n, costs `n_iterations (4 m^2 n + 2 m^3)` operations a step: with
    12 layers of 512 and 65,536 tokens a step about 3% of the model's own. Its state is one array,
    where AdamW has two; devices of the axis `fsdp` have a part each.

    Args:
      learning_rate: of the matrices, a number or a schedule such as `@optimizer.cosine()`.
      adam_learning_rate: of all else; None: the same.
      momentum: decay of the mean of gradients.
      n_iterations: of the Newton-Schulz iteration.
      rms: the root mean square of a matrix's update before the learning rate. With 0.2, which is
        about AdamW's, both can have one learning rate (Liu et al. 2025, "Muon is Scalable for LLM
        Training", eq. 4). None: `sqrt(max(1, outputs / inputs))` times an orthogonal matrix, for
        which the learning rate is about 0.02.
      weight_decay: times the learning rate, the fraction a matrix shrinks by in a step, in both.
      b1, b2, eps: of AdamW.
      momentum_dtype: of the matrices' momentum between steps.
      clip: as in `adam`.
      matrices: a regular expression, found in the names of Muon's matrices.
      no_decay: as in `adamw`.
      width, base_width: the model's `d_model`, and that of a smaller model whose rates these are;
        None: they are this one's. See `rates_by_width`. Training refuses a `width` that is not the
        model's. The record has the rates as they are given. Weight decay, which a rate multiplies,
        falls with it.

    Raises:
      SettingError: no trained parameter's name has `matrices` in it, when the state is made; or one
        of two widths is given.
    """
    decays = dict(weight_decay=weight_decay, mask=_decay_mask(no_decay))
    if (width is None) != (base_width is None):
        raise SettingError(
            f"width is {width} and base_width is {base_width}: give both, or leave both out"
        )
    of_matrices, of_readout = rates_by_width(width or 1, base_width or 1, rms)

    def of_rates(rate, adam_rate=None) -> optax.GradientTransformation:
        by_muon = optax.contrib.muon(
            times(of_matrices, rate),
            ns_steps=n_iterations,
            beta=momentum,
            weight_decay=weight_decay,
            weight_decay_mask=decays["mask"],
            mu_dtype=momentum_dtype,
            muon_weight_dimension_numbers=functools.partial(
                jax.tree_util.tree_map_with_path, lambda path, _: axes_of_matrix(path)
            ),
            consistent_rms=rms,
        )
        adam_rate = rate if adam_rate is None else adam_rate
        transforms = {"muon": by_muon, "adam": optax.adamw(adam_rate, b1, b2, eps, **decays)}
        readouts = READOUTS if width else ()
        if readouts:  # a group without parameters would be in checkpoints
            adam_rate = times(of_readout, adam_rate)
            transforms["readout"] = optax.adamw(adam_rate, b1, b2, eps, **decays)
        return optax.partition(transforms, functools.partial(groups, matrices, readouts))

    others = () if adam_learning_rate is None else (adam_learning_rate,)
    optimizer = _optimizer(learning_rate, clip, of_rates, *others)
    optimizer.width = width
    return optimizer


def _optimizer(learning_rate, clip, of_rates, *others) -> Optimizer:
    """`of_rates(learning_rate, *others)` on clipped gradients, with its schedules."""

    def clipped(*rates) -> optax.GradientTransformation:
        inner = of_rates(*rates)
        return inner if clip is None else optax.chain(optax.clip_by_global_norm(clip), inner)

    for rate in (learning_rate, *others):
        if callable(rate) and not isinstance(rate, RateSchedule):
            check_schedule(rate)
    return scheduled((learning_rate, *others), clipped)


def scheduled(rates: Sequence[float | optax.Schedule], of_rates: Callable) -> Optimizer:
    """The optimizer with these numbers and schedules, which it keeps."""
    optimizer = Optimizer(*of_rates(*rates))
    first = rates[0]
    optimizer.learning_rate = first if callable(first) else optax.constant_schedule(first)
    optimizer.schedules, optimizer.of_rates = tuple(rates), of_rates
    return optimizer


def _decay_mask(no_decay: str):
    def mask(params):
        def decays(path, leaf):
            name = name_of(path)
            return n_axes_of(name, leaf) >= 2 and not re.search(no_decay, name, re.IGNORECASE)

        return jax.tree_util.tree_map_with_path(decays, params)

    return mask
