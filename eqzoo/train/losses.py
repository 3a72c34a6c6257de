"""Losses: one number per example, computed at least in float32. `weighted_mean` makes one number of them."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from eqzoo.nn._precision import at_least_float32
from eqzoo.train._batch import check_same_shape, label_logit, weighted_sum


def cross_entropy(
    logits: Float[Array, "*batch classes"],
    labels: Int[Array, "..."] | Float[Array, "..."],
    *,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Float[Array, "*batch"]:
    """Cross-entropy with labels that are classes, "*batch", or probabilities, "*batch classes". A label that is no
    class, such as -1, has the loss NaN.

    `smoothing` is the share of the uniform distribution that is mixed into the labels (Szegedy et al., 2016). `z_loss`
    times the squared log of the softmax's denominator is added, which keeps the logits from drifting; PaLM takes 1e-4.

    ```python
    cross_entropy(jnp.zeros((2, 4)), jnp.array([3, 0]))  # Array([1.3862944, 1.3862944], dtype=float32)
    ```
    """
    if not 0 <= smoothing <= 1:
        raise ValueError(f"cross_entropy: smoothing={smoothing} is no share of a label; choose it from 0 to 1")
    is_class = jnp.issubdtype(labels.dtype, jnp.integer)
    expected, remedy = (
        (logits.shape[:-1], "give one integer for each row of logits")
        if is_class
        else (logits.shape, "give one float for each logit, or integers that name the classes")
    )
    check_same_shape("cross_entropy", "labels", labels, expected, remedy)

    logits = at_least_float32(logits)
    # All is relative to the largest logit, so that none overflows and an offset of all costs no digits.
    peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    log_total = jnp.log(jnp.sum(jnp.exp(logits - peak[..., None]), axis=-1))
    if is_class:
        losses = log_total - (label_logit(logits, labels) - peak)
    else:
        losses = jnp.sum(labels * (log_total[..., None] - (logits - peak[..., None])), axis=-1)
    if smoothing:
        losses = (1 - smoothing) * losses + smoothing * (log_total - (jnp.mean(logits, axis=-1) - peak))
    if z_loss:
        losses = losses + z_loss * (log_total + peak) ** 2
    return losses


def binary_cross_entropy(
    logits: Float[Array, "*batch classes"], targets: Float[Array, "..."] | Int[Array, "..."] | Bool[Array, "..."]
) -> Float[Array, "*batch"]:
    """Cross-entropy of each class on its own, with targets from 0 to 1, and its mean over the classes.

    ```python
    binary_cross_entropy(jnp.zeros((1, 2)), jnp.array([[1, 0]]))  # Array([0.6931472], dtype=float32)
    ```
    """
    _check_targets("binary_cross_entropy", targets, logits)
    return jnp.mean(optax.sigmoid_binary_cross_entropy(at_least_float32(logits), targets), axis=-1)


def focal(
    logits: Float[Array, "*batch classes"],
    targets: Float[Array, "..."] | Int[Array, "..."] | Bool[Array, "..."],
    *,
    alpha: float = 0.25,
    gamma: float = 2.0,
) -> Float[Array, "*batch"]:
    """The sigmoid focal loss (Lin et al., 2017), a binary cross-entropy in which what is easy counts less, and its mean
    over the classes.

    `alpha` is the weight of positive targets and `1 - alpha` that of negative ones; the larger `gamma`, the less counts
    what is predicted well.

    ```python
    focal(jnp.zeros((1, 2)), jnp.array([[1, 0]]))  # Array([0.0866434], dtype=float32)
    ```
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"focal: alpha={alpha} is no share of the weight; choose it from 0 to 1")
    _check_targets("focal", targets, logits)
    return jnp.mean(optax.sigmoid_focal_loss(at_least_float32(logits), targets, alpha=alpha, gamma=gamma), axis=-1)


def distillation(
    logits: Float[Array, "*batch classes"], teacher_logits: Float[Array, "..."], *, temperature: float = 1.0
) -> Float[Array, "*batch"]:
    """How far a student's probabilities are from its teacher's (Hinton et al., 2015): their Kullback-Leibler divergence
    at a temperature, times its square so that gradients keep their size. The teacher gets no gradient.

    ```python
    distillation(jnp.array([[1.0, 0.0]]), jnp.array([[2.0, 1.0]]), temperature=2.0)  # Array([0.], dtype=float32)
    ```
    """
    if temperature <= 0:
        raise ValueError(f"distillation: temperature={temperature} is not positive; choose 1.0 or higher")
    remedy = "the teacher has to know the same classes"
    check_same_shape("distillation", "teacher_logits", teacher_logits, logits.shape, remedy)
    student = jax.nn.log_softmax(at_least_float32(logits) / temperature, axis=-1)
    teacher = jax.nn.log_softmax(jax.lax.stop_gradient(at_least_float32(teacher_logits)) / temperature, axis=-1)
    return temperature**2 * jnp.sum(jnp.exp(teacher) * (teacher - student), axis=-1)


def info_nce(
    a: Float[Array, "batch dim"],
    b: Float[Array, "..."],
    scale: float | Float[Array, ""],
    weight: Float[Array, "..."] | None = None,
) -> Float[Array, " batch"]:
    """CLIP's loss (Radford et al., 2021): each `a` has to find its `b` among those of the batch, and the other way
    round. Both are normalised here, and `scale` multiplies their similarities (it is the exp of CLIP's `logit_scale`).

    A pair of weight 0 is nobody's wrong answer.

    ```python
    pairs = jnp.eye(2)
    float(info_nce(pairs, pairs, 0.0)[0] / jnp.log(2))  # 1.0
    ```
    """
    logits = scale * _similarities("info_nce", a, b)
    own, counts = _own_and_counting_pairs("info_nce", a, weight)
    labels = jnp.arange(len(a))
    losses = [cross_entropy(jnp.where(own | counts, each, -jnp.inf), labels) for each in (logits, logits.T)]
    return (losses[0] + losses[1]) / 2


def siglip(
    a: Float[Array, "batch dim"],
    b: Float[Array, "..."],
    scale: float | Float[Array, ""],
    bias: float | Float[Array, ""],
    weight: Float[Array, "..."] | None = None,
) -> Float[Array, " batch"]:
    """SigLIP's loss (Zhai et al., 2023): whether `a` and `b` belong together, asked of each two of the batch and summed
    for each `a`. Both are normalised here; `scale` multiplies their similarities (it is the exp of SigLIP's
    `logit_scale`), and `bias` is added.

    A pair of weight 0 is nobody's wrong answer.

    ```python
    pairs = jnp.eye(2)
    float(siglip(pairs, pairs, 0.0, 0.0)[0] / jnp.log(2))  # 2.0
    ```
    """
    logits = scale * _similarities("siglip", a, b) + bias
    own, counts = _own_and_counting_pairs("siglip", a, weight)
    losses = -jax.nn.log_sigmoid(jnp.where(own, logits, -logits))
    return jnp.sum(jnp.where(own | counts, losses, 0), axis=-1)


def weighted_mean(values: Float[Array, "*batch"], weight: Float[Array, "..."]) -> Float[Array, ""]:
    """The mean of `values` by weight, and 0 if all weights are 0. What has weight 0 counts nowhere, even if it is NaN.

    ```python
    weighted_mean(jnp.array([1.0, 3.0, jnp.nan]), jnp.array([1.0, 1.0, 0.0]))  # Array(2., dtype=float32)
    ```
    """
    check_same_shape("weighted_mean", "weight", weight, values.shape, "give one weight for each value")
    weight = at_least_float32(weight)
    total = jnp.sum(weight)
    return weighted_sum(values, weight) / jnp.where(total == 0, 1, total)


def _check_targets(function: str, targets: Array, logits: Float[Array, "*batch classes"]) -> None:
    remedy = "give one target for each logit, such as jax.nn.one_hot(labels, classes)"
    check_same_shape(function, "targets", targets, logits.shape, remedy)


def _similarities(function: str, a: Float[Array, "batch dim"], b: Float[Array, "..."]) -> Float[Array, "batch batch"]:
    check_same_shape(function, "b", b, a.shape, "give one b for each a, of the same size")
    # Not in tensor-core precision: a scale of 100 would turn its rounding into errors of the loss.
    return jnp.matmul(_normalised(a), _normalised(b).T, precision=jax.lax.Precision.HIGHEST)


def _normalised(x: Float[Array, "batch dim"]) -> Float[Array, "batch dim"]:
    x = at_least_float32(x)
    square = jnp.sum(x * x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(square, 1e-24))  # a vector of zeros has no direction, but a gradient


def _own_and_counting_pairs(
    function: str, a: Float[Array, "batch dim"], weight: Float[Array, "..."] | None
) -> tuple[Bool[Array, "batch batch"], Bool[Array, "batch batch"]]:
    """Whether the pair of each row is that of the column, and whether the pair of the column counts."""
    own = jnp.eye(len(a), dtype=bool)
    if weight is None:
        return own, jnp.ones_like(own)
    check_same_shape(function, "weight", weight, a.shape[:1], "give one weight for each pair")
    return own, jnp.broadcast_to(weight != 0, own.shape)
