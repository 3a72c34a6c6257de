"""Metrics: what sklearn says of the whole, whatever the batches, the weights and the devices it came in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.calibration
import sklearn.metrics
import torch

from eqzoo.sharding import make_mesh, shard_batch
from eqzoo.train.metrics import Calibration, Mean, accuracy, add_up, calibration, collect, confusion

DRAW = np.random.default_rng(0)
LOGITS = (2 * DRAW.standard_normal((64, 5))).astype(np.float32)
LABELS = np.where(DRAW.random(64) < 0.5, LOGITS.argmax(-1), DRAW.integers(0, 5, 64)).astype(np.int32)
WEIGHT = DRAW.integers(0, 4, 64).astype(np.float32) / 2
BATCHES = (slice(0, 30), slice(30, 33), slice(33, 64))


def measure(logits, labels, weight=None):
    return {
        "mean": Mean.of(logits[..., 0], weight),
        "accuracy": accuracy(logits, labels, weight),
        "top3": accuracy(logits, labels, weight, k=3),
        "calibration": calibration(logits, labels, weight),
        "confusion": confusion(logits, labels, weight),
    }


def of_sklearn(logits, labels, weight):
    matrix = sklearn.metrics.confusion_matrix(labels, logits.argmax(-1), labels=range(5), sample_weight=weight)
    return {
        "mean": np.average(logits[:, 0], weights=weight),
        "accuracy": sklearn.metrics.accuracy_score(labels, logits.argmax(-1), sample_weight=weight),
        "top3": sklearn.metrics.top_k_accuracy_score(labels, logits, k=3, labels=range(5), sample_weight=weight),
        "confusion": matrix,
    }


def assert_is_sklearns(metrics, weight):
    expected = of_sklearn(LOGITS, LABELS, weight)
    for name in ("mean", "accuracy", "top3"):
        np.testing.assert_allclose(metrics[name].value, expected[name], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(metrics["confusion"], expected["confusion"])
    assert_bins_are_right(metrics["calibration"], weight)


def assert_bins_are_right(metric, weight):
    """sklearn has no weights here, but a weight says how often an example counts: those here are halves."""
    often = np.repeat(np.arange(64), 2 * np.asarray(weight, int) if weight is None else (2 * weight).astype(int))
    probabilities = torch.softmax(torch.tensor(LOGITS), -1).numpy()[often]
    correct, confidence = LOGITS.argmax(-1)[often] == LABELS[often], probabilities.max(-1)
    true, predicted = sklearn.calibration.calibration_curve(correct, confidence, n_bins=15)
    counts = np.histogram(confidence, bins=15, range=(0, 1))[0]
    filled = counts > 0
    bins = metric.bins
    np.testing.assert_allclose(bins.share, counts / counts.sum(), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(bins.accuracy)[filled], true, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(bins.confidence)[filled], predicted, rtol=1e-5)
    assert np.all(np.isnan(np.asarray(bins.accuracy)[~filled]))
    np.testing.assert_allclose(metric.error, np.sum(counts[filled] * abs(true - predicted)) / counts.sum(), rtol=1e-5)


@pytest.fixture(scope="module")
def jitted():
    return jax.jit(measure)


def test_metrics_are_those_of_sklearn(jitted):
    assert_is_sklearns(jitted(LOGITS, LABELS, WEIGHT), WEIGHT)


def test_without_weights_each_example_counts_once(jitted):
    assert_is_sklearns(jitted(LOGITS, LABELS), np.ones(64))


def test_batches_of_any_size_add_up_on_the_device_and_on_the_host(jitted):
    parts = [jitted(LOGITS[batch], LABELS[batch], WEIGHT[batch]) for batch in BATCHES]
    assert_is_sklearns(add_up(parts), WEIGHT)
    assert_is_sklearns(jax.tree.map(lambda *leaves: sum(leaves), *parts), WEIGHT)
    means = [part["accuracy"] for part in parts]
    assert (means[0] + means[1] + means[2]).value == add_up(means).value.astype(np.float32)
    bins = [part["calibration"] for part in parts]
    assert_bins_are_right(bins[0] + bins[1] + bins[2], WEIGHT)


def test_they_add_up_in_a_scan():
    def step(total, batch):
        return jax.tree.map(jnp.add, total, measure(*batch)), None

    batches = (LOGITS.reshape(4, 16, 5), LABELS.reshape(4, 16), WEIGHT.reshape(4, 16))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(measure, *(LOGITS, LABELS)))
    assert_is_sklearns(jax.jit(lambda batches: jax.lax.scan(step, zeros, batches)[0])(batches), WEIGHT)


def test_a_batch_split_over_devices_measures_the_same(jitted):
    batch = shard_batch((LOGITS, LABELS, WEIGHT), make_mesh(data=8))
    assert len(batch[0].addressable_shards) == 8
    metrics = jitted(*batch)
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(metrics))
    assert_is_sklearns(metrics, WEIGHT)


def test_batch_may_have_several_axes(jitted):
    shaped = jitted(LOGITS.reshape(4, 16, 5), LABELS.reshape(4, 16), WEIGHT.reshape(4, 16))
    assert_is_sklearns(shaped, WEIGHT)


def test_what_has_weight_0_counts_nowhere_whatever_it_is(jitted):
    batch = jnp.asarray(LOGITS).at[::3].set(jnp.nan), jnp.asarray(LABELS).at[::3].set(-1)
    weight = jnp.ones(64).at[::3].set(0.0)
    there = np.arange(64) % 3 > 0
    for ours, expected in zip(
        jax.tree.leaves(jitted(*batch, weight)), jax.tree.leaves(jitted(LOGITS[there], LABELS[there])), strict=True
    ):
        np.testing.assert_allclose(ours, expected, rtol=1e-5)


def test_half_precision_counts_in_float32(jitted):
    ones = jnp.ones(1001, jnp.bfloat16)
    assert float(Mean.of(ones).total) == float(Mean.of(ones).weight) == float(Mean.of(ones, ones).weight) == 1001
    half = jnp.asarray(LOGITS, jnp.bfloat16)
    for ours, wide in zip(*(jax.tree.leaves(jitted(x, LABELS)) for x in (half, half.astype(jnp.float32))), strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, wide, rtol=1e-6)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_accuracy_is_torchs_top_k(k):
    best = torch.topk(torch.tensor(LOGITS), k).indices
    expected = (best == torch.tensor(LABELS)[:, None]).any(-1).float().mean()
    assert accuracy(jnp.asarray(LOGITS), jnp.asarray(LABELS), k=k).value == float(expected)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_of_equal_logits_the_first_counts_as_the_largest(k):
    logits = LOGITS.round()
    best = np.argsort(-logits, axis=-1, stable=True)[:, :k]
    assert len(set(map(len, map(set, logits)))) > 1  # there are some
    expected = np.mean(np.any(best == LABELS[:, None], -1))
    assert accuracy(jnp.asarray(logits), jnp.asarray(LABELS), k=k).value == expected
    collapsed = accuracy(jnp.zeros((5, 5)), jnp.arange(5), k=k)
    assert collapsed.total == k


def test_nan_counts_as_wrong_and_so_does_a_label_that_is_no_class():
    all_nan = jnp.full((2, 5), jnp.nan)
    assert accuracy(all_nan, jnp.array([1, 4])).value == 0
    assert accuracy(jnp.array([[0.0, jnp.nan, 1.0]]), jnp.array([2])).value == 0
    for k in range(1, 6):
        assert accuracy(jnp.asarray(LOGITS[:2]), jnp.array([-1, 5]), k=k).value == 0
    matrix = confusion(jnp.asarray(LOGITS[:3]), jnp.array([-1, 5, 2]))
    assert (np.sum(matrix), np.sum(matrix[2])) == (1, 1)


def test_bins_are_closed_above_as_guo_and_sklearn_have_them():
    certain = jnp.array([[100.0, 0.0], [0.0, 0.0]])
    metric = calibration(certain, jnp.array([0, 1]), bins=4)
    np.testing.assert_array_equal(metric.weight, [0, 1, 0, 1])
    np.testing.assert_array_equal(metric.correct, [0, 0, 0, 1])
    np.testing.assert_array_equal(metric.confidence, [0, 0.5, 0, 1])
    assert metric.error == 0.25


@pytest.mark.parametrize("asarray", [np.asarray, jnp.asarray])
def test_of_nothing_all_is_nan(asarray):
    nothing = Mean.of(jnp.array([1.0, jnp.nan]), jnp.zeros(2))
    assert np.isnan(jax.tree.map(asarray, nothing).value)
    empty = jax.tree.map(asarray, calibration(jnp.zeros((2, 3)), jnp.zeros(2, int), jnp.zeros(2)))
    assert np.isnan(empty.error)
    assert np.all(np.isnan(empty.bins.share))


def test_a_long_sum_is_exact_and_stays_on_the_host():
    """In float32, 2^24 + 1 is 2^24."""
    first = {"loss": Mean(jnp.array(2.0**24), jnp.array(1.0)), "half": jnp.ones((), jnp.bfloat16), "count": 3}
    one = {"loss": Mean(jnp.array(1.0), jnp.array(1.0)), "half": jnp.ones((), jnp.bfloat16), "count": 1}
    total = add_up([first, *[one] * 400])
    assert (total["loss"].total, total["loss"].weight, total["half"], total["count"]) == (2**24 + 400, 401, 401, 403)
    assert all(isinstance(leaf, np.ndarray) and leaf.dtype == np.float64 for leaf in jax.tree.leaves(total))
    assert isinstance(total["loss"].value, np.float64)
    bins = add_up([Calibration(jnp.ones(3), jnp.ones(3), jnp.ones(3))] * 3)
    assert isinstance(bins.error, np.float64)
    assert isinstance(bins.bins.share, np.ndarray)


def test_adding_up_reads_a_tree_only_when_the_next_has_been_made():
    events = []

    class OnDevice:
        def __init__(self, index):
            self.index = index
            events.append(f"made {index}")

        def __array__(self, dtype=None, copy=None):
            events.append(f"read {self.index}")
            return np.asarray(float(self.index), dtype)

    assert add_up({"metric": OnDevice(index)} for index in range(4)) == {"metric": 6}
    assert events == ["made 0", "made 1", "read 0", "made 2", "read 1", "made 3", "read 2", "read 3"]


X, Y = jnp.zeros((4, 3)), jnp.zeros(4, int)


def test_collecting_puts_the_rows_of_all_batches_together_but_for_those_of_weight_0():
    order = np.arange(64)
    columns = {"logits": LOGITS, "order": order, "weight": WEIGHT}
    collected = collect({name: jnp.asarray(column[batch]) for name, column in columns.items()} for batch in BATCHES)
    counted = order[WEIGHT > 0]
    assert 0 < len(counted) < 64
    assert np.array_equal(collected["order"], counted)
    assert np.array_equal(collected["logits"], LOGITS[counted])
    assert np.array_equal(collected["weight"], WEIGHT[counted])
    assert all(isinstance(column, np.ndarray) for column in collected.values())
    with pytest.raises(ValueError, match="no rows to collect"):
        collect([])


def test_collecting_reads_a_batch_only_when_the_next_has_been_made(monkeypatch):
    events, get = [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: (events.append("read"), get(tree))[1])

    def rows():
        for _ in range(3):
            events.append("made")
            yield {"weight": jnp.ones(2)}

    collect(rows())
    assert events == ["made", "made", "read", "made", "read", "read"]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: accuracy(X, Y, k=4), r"accuracy: k=4 with 3 classes; choose k from 1 to 3"),
        (lambda: accuracy(X, Y, k=0), r"accuracy: k=0 with 3 classes; choose k from 1 to 3"),
        (lambda: accuracy(X, Y[:, None]), r"accuracy: labels has shape \(4, 1\), expected \(4,\); give one label for"),
        (lambda: calibration(X, Y[:, None]), r"calibration: labels has shape \(4, 1\), expected \(4,\); give one labe"),
        (lambda: confusion(X, Y[:1]), r"confusion: labels has shape \(1,\), expected \(4,\); give one label for each"),
        (lambda: Mean.of(X, jnp.ones(3)), r"Mean.of: weight has shape \(3,\), expected \(4, 3\); give one weight for"),
        (lambda: calibration(X, Y, X), r"calibration: weight has shape \(4, 3\), expected \(4,\); give one weight for"),
        (lambda: add_up([]), r"add_up: there are no metrics to add up; pass those of at least one batch"),
        (lambda: add_up([{"a": X}, {"a": Y}]), r"add_up: trees 0 and 1 differ .*; give trees of one structure"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_remedy(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
