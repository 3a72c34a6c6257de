"""What is measured along the way, as sums that add up: over batches of any sizes, over steps, over devices.

A metric is a pytree that is added leaf by leaf; what one asks for at the end (a mean, an error) is computed from the
sums. An example of weight 0 counts nowhere, whatever its numbers are.
"""

import operator
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from eqzoo.nn._precision import at_least_float32
from eqzoo.train._batch import check_same_shape, label_logit, weighted_sum
from eqzoo.tree.diff import check_same_structure

Tree = TypeVar("Tree", bound=PyTree)
Sum = Array | np.ndarray | np.floating  # of numpy once `add_up` has read it


class Mean(eqx.Module):
    """A mean that adds up: the sum of the values and the sum of their weights.

    ```python
    both = Mean.of(jnp.array([1.0, 2.0, 3.0])) + Mean.of(jnp.array([6.0, 9.0]), jnp.array([1.0, 0.0]))
    float(both.value)  # 3.0
    ```
    """

    total: Float[Sum, ""]
    weight: Float[Sum, ""]

    @classmethod
    def of(cls, values: Float[Array, "..."] | Bool[Array, "..."], weight: Float[Array, "..."] | None = None) -> "Mean":
        """The mean of all `values`, each of which counts `weight` times, or once."""
        weight = _weight("Mean.of", weight, values)
        return cls(weighted_sum(values, weight), jnp.sum(weight))

    @property
    def value(self) -> Float[Sum, ""]:
        """The mean; NaN if nothing has been counted."""
        with np.errstate(invalid="ignore"):
            return self.total / self.weight

    def __add__(self, other: "Mean") -> "Mean":
        return jax.tree.map(operator.add, self, other)


class Bins(NamedTuple):
    """What a reliability diagram shows of each bin; confidence and accuracy of an empty one are NaN."""

    confidence: Float[Sum, " bins"]
    accuracy: Float[Sum, " bins"]
    share: Float[Sum, " bins"]


class Calibration(eqx.Module):
    """How often a classifier is right, given how sure it is: sums over the examples of each of several bins, the first
    for confidences from 0, the last for those up to 1. `calibration` makes one.

    ```python
    sure = Calibration(confidence=jnp.array([0.0, 3.6]), correct=jnp.array([0.0, 3.0]), weight=jnp.array([0.0, 4.0]))
    round(float(sure.error), 3), sure.bins.accuracy.tolist()  # (0.15, [nan, 0.75])
    ```
    """

    confidence: Float[Sum, " bins"]
    correct: Float[Sum, " bins"]
    weight: Float[Sum, " bins"]

    @property
    def error(self) -> Float[Sum, ""]:
        """The expected calibration error (Guo et al., 2017); NaN if nothing has been counted."""
        with np.errstate(invalid="ignore"):
            return abs(self.correct - self.confidence).sum() / self.weight.sum()

    @property
    def bins(self) -> Bins:
        """Mean confidence, accuracy and share of the examples, each by bin."""
        with np.errstate(invalid="ignore"):
            return Bins(self.confidence / self.weight, self.correct / self.weight, self.weight / self.weight.sum())

    def __add__(self, other: "Calibration") -> "Calibration":
        return jax.tree.map(operator.add, self, other)


def accuracy(
    logits: Float[Array, "*batch classes"],
    labels: Int[Array, "..."],
    weight: Float[Array, "..."] | None = None,
    *,
    k: int = 1,
) -> Mean:
    """How often the label is among the `k` largest logits. Of equal logits, the first counts as the largest, and a NaN
    counts as larger than any number.

    ```python
    logits, labels = jnp.array([[0.1, 0.7, 0.2], [0.5, 0.2, 0.3]]), jnp.array([1, 2])
    float(accuracy(logits, labels).value), float(accuracy(logits, labels, k=2).value)  # (0.5, 1.0)
    ```
    """
    classes = logits.shape[-1]
    if not 1 <= k <= classes:
        raise ValueError(f"accuracy: k={k} with {classes} classes; choose k from 1 to {classes}")
    _check_labels("accuracy", labels, logits)
    # The label's rank, by a sum over the classes: no sort, and they may be split over devices.
    index, label = jnp.arange(classes), labels[..., None]
    own = label_logit(logits, labels)[..., None]
    ahead = jnp.where(index < label, ~(logits < own), ~(logits <= own)) & (index != label)  # NaN is neither
    correct = jnp.sum(ahead, axis=-1) < k
    return Mean.of(correct, weight)


def calibration(
    logits: Float[Array, "*batch classes"],
    labels: Int[Array, "..."],
    weight: Float[Array, "..."] | None = None,
    *,
    bins: int = 15,
) -> Calibration:
    """The softmax's largest probability against how often its class is the label, in bins of equal width.

    ```python
    logits = jnp.log(jnp.array([[0.75, 0.25], [0.25, 0.75]]))
    round(float(calibration(logits, jnp.array([0, 0])).error), 3)  # 0.25
    ```
    """
    _check_labels("calibration", labels, logits)
    confidence = jnp.max(jax.nn.softmax(at_least_float32(logits), axis=-1), axis=-1).ravel()
    correct = (jnp.argmax(logits, axis=-1) == labels).ravel()
    weight = _weight("calibration", weight, labels).ravel()
    edges = jnp.linspace(0, 1, bins + 1)[:, None]
    weight = jnp.where((confidence > edges[:-1]) & (confidence <= edges[1:]), weight, 0)  # by bin
    return Calibration(
        confidence=weighted_sum(confidence, weight, axis=-1),
        correct=weighted_sum(correct, weight, axis=-1),
        weight=jnp.sum(weight, axis=-1),
    )


def confusion(
    logits: Float[Array, "*batch classes"], labels: Int[Array, "..."], weight: Float[Array, "..."] | None = None
) -> Float[Array, "classes classes"]:
    """How often each true class (row) was taken for each class (column).

    ```python
    confusion(jnp.array([[2.0, 1.0], [4.0, 3.0]]), jnp.array([0, 1])).tolist()  # [[1.0, 0.0], [1.0, 0.0]]
    ```
    """
    _check_labels("confusion", labels, logits)
    classes = logits.shape[-1]
    weight = _weight("confusion", weight, labels).ravel()
    true = jax.nn.one_hot(labels.ravel(), classes, dtype=weight.dtype)
    predicted = jax.nn.one_hot(jnp.argmax(logits, axis=-1).ravel(), classes, dtype=weight.dtype)
    # As a product it is exact and the same in each run; a scatter's order is not.
    return jnp.matmul(true.T, weight[:, None] * predicted, precision=jax.lax.Precision.HIGHEST)


def add_up(metrics: Iterable[Tree]) -> Tree:
    """The sum of trees of metrics, in float64 on the host, so that long sums stay exact. A tree is read when the next
    has been made, so that the device never waits.

    ```python
    batches = [jnp.array([1.0, 2.0]), jnp.array([6.0])]
    total = add_up({"loss": Mean.of(losses)} for losses in batches)
    float(total["loss"].value)  # 3.0
    ```
    """
    total = waiting = None
    for tree in metrics:
        if waiting is not None:
            total = _plus(total, waiting)
        waiting = tree
    if waiting is None:
        raise ValueError("add_up: there are no metrics to add up; pass those of at least one batch")
    return _plus(total, waiting)


def collect(rows: Iterable[Mapping[str, Shaped[Array, "batch ..."]]]) -> dict[str, Shaped[np.ndarray, "rows ..."]]:
    """The rows of all batches one after the other, on the host, but for those of `weight` 0. A batch is read when the
    next has been made, so that the device never waits.

    ```python
    batches = [{"predicted": jnp.array([7, 3]), "weight": jnp.array([1.0, 0.0])}] * 2
    collect(batches)["predicted"].tolist()  # [7, 7]
    ```
    """
    kept, waiting = [], None
    for batch in rows:
        if waiting is not None:
            kept.append(_weighty(waiting))
        waiting = batch
    if waiting is None:
        raise ValueError("collect: there are no rows to collect; pass those of at least one batch")
    kept.append(_weighty(waiting))
    return {name: np.concatenate([batch[name] for batch in kept]) for name in kept[0]}


def _weighty(batch: Mapping[str, Shaped[Array, "batch ..."]]) -> dict[str, Shaped[np.ndarray, "rows ..."]]:
    columns = {name: np.asarray(column) for name, column in jax.device_get(dict(batch)).items()}
    return {name: column[columns["weight"] != 0] for name, column in columns.items()}


def _plus(total: Tree | None, tree: Tree) -> Tree:
    tree = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), jax.device_get(tree))
    if total is None:
        return tree
    check_same_structure("add_up", total, tree)
    return jax.tree.map(lambda a, b: np.asarray(a + b), total, tree)


def _weight(function: str, weight: Float[Array, "..."] | None, values: Array) -> Float[Array, "*axes"]:
    if weight is None:
        return jnp.ones(values.shape, jnp.float32)
    check_same_shape(function, "weight", weight, values.shape, "give one weight for each value")
    return at_least_float32(weight)


def _check_labels(function: str, labels: Int[Array, "..."], logits: Float[Array, "*batch classes"]) -> None:
    check_same_shape(function, "labels", labels, logits.shape[:-1], "give one label for each row of logits")
