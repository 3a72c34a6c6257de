"""Losses: values and gradients of torch, torchvision and transformers; what has weight 0 counts nowhere."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torchvision
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from transformers import CLIPConfig, CLIPModel, SiglipConfig, SiglipModel

from eqzoo.sharding import make_mesh
from eqzoo.train.losses import (
    binary_cross_entropy,
    cross_entropy,
    distillation,
    focal,
    info_nce,
    siglip,
    weighted_mean,
)

DRAW = np.random.default_rng(0)
LOGITS = (3 * DRAW.standard_normal((4, 3, 8))).astype(np.float32)
TEACHER = (3 * DRAW.standard_normal((4, 3, 8))).astype(np.float32)
LABELS = DRAW.integers(0, 8, (4, 3))
SOFT = DRAW.dirichlet(np.ones(8), (4, 3)).astype(np.float32)
HARD = DRAW.integers(0, 2, (4, 3, 8)).astype(np.float32)
SHARES = DRAW.random((4, 3, 8)).astype(np.float32)
A = DRAW.standard_normal((5, 6)).astype(np.float32)
B = DRAW.standard_normal((5, 6)).astype(np.float32)

EVERY_LOSS = pytest.mark.parametrize(
    "loss",
    [
        lambda x: cross_entropy(x, jnp.asarray(LABELS), smoothing=0.1, z_loss=0.1),
        lambda x: cross_entropy(x, jnp.asarray(SOFT), smoothing=0.1, z_loss=0.1),
        lambda x: binary_cross_entropy(x, jnp.asarray(SHARES)),
        lambda x: focal(x, jnp.asarray(SHARES), gamma=1.5),
        lambda x: distillation(x, jnp.asarray(TEACHER), temperature=2.0),
        lambda x: info_nce(x[:, 0], jnp.asarray(TEACHER[:, 0]), 5.0),
        lambda x: siglip(x[:, 0], jnp.asarray(TEACHER[:, 0]), 5.0, -2.0),
    ],
    ids=["classes", "probabilities", "binary", "focal", "distillation", "info_nce", "siglip"],
)


def assert_close(ours, theirs, tolerance=1e-5):
    theirs = np.asarray(theirs)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * np.abs(theirs).max())


def assert_like_torch(ours, theirs, logits=LOGITS):
    """Both map logits to one loss per example: the same values, and the same gradient of a weighted sum of them."""
    ours, pull = jax.vjp(jax.jit(ours), jnp.asarray(logits))
    leaf = torch.tensor(logits, requires_grad=True)
    expected = theirs(leaf)
    assert ours.shape == logits.shape[:-1]
    assert_close(ours, expected.detach())
    weight = DRAW.standard_normal(ours.shape).astype(np.float32)
    expected.backward(torch.tensor(weight))
    assert_close(pull(jnp.asarray(weight))[0], leaf.grad, 1e-4)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("labels", [LABELS, SOFT], ids=["classes", "probabilities"])
def test_cross_entropy_is_torchs(labels, smoothing):
    def theirs(logits):
        target = torch.tensor(labels).reshape(-1, *labels.shape[2:])
        options = {"label_smoothing": smoothing, "reduction": "none"}
        return torch.nn.functional.cross_entropy(logits.reshape(-1, 8), target, **options).reshape(4, 3)

    assert_like_torch(lambda logits: cross_entropy(logits, jnp.asarray(labels), smoothing=smoothing), theirs)


@pytest.mark.parametrize("labels", [LABELS, SOFT], ids=["classes", "probabilities"])
def test_z_loss_adds_the_squared_log_of_the_denominator(labels):
    def theirs(logits):
        target = torch.tensor(labels).reshape(-1, *labels.shape[2:])
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 8), target, reduction="none").reshape(4, 3)
        return loss + 0.2 * torch.logsumexp(logits, -1) ** 2

    assert_like_torch(lambda logits: cross_entropy(logits, jnp.asarray(labels), z_loss=0.2), theirs)


@pytest.mark.parametrize("targets", [HARD, SHARES], ids=["hard", "soft"])
def test_binary_cross_entropy_is_torchs(targets):
    torchs = torch.nn.functional.binary_cross_entropy_with_logits
    assert_like_torch(
        lambda logits: binary_cross_entropy(logits, jnp.asarray(targets)),
        lambda logits: torchs(logits, torch.tensor(targets), reduction="none").mean(-1),
    )


@pytest.mark.parametrize(("alpha", "gamma"), [(0.25, 2.0), (0.8, 0.5), (0.5, 0.0)])
@pytest.mark.parametrize("targets", [HARD, SHARES], ids=["hard", "soft"])
def test_focal_is_torchvisions(targets, alpha, gamma):
    theirs = partial(torchvision.ops.sigmoid_focal_loss, alpha=alpha, gamma=gamma)
    assert_like_torch(
        lambda logits: focal(logits, jnp.asarray(targets), alpha=alpha, gamma=gamma),
        lambda logits: theirs(logits, torch.tensor(targets)).mean(-1),
    )


def test_focals_defaults_are_torchvisions():
    expected = torchvision.ops.sigmoid_focal_loss(torch.tensor(LOGITS), torch.tensor(HARD)).mean(-1)
    assert_close(focal(jnp.asarray(LOGITS), jnp.asarray(HARD)), expected)


@pytest.mark.parametrize("loss", [binary_cross_entropy, focal])
def test_targets_may_be_integers_or_flags(loss):
    expected = loss(jnp.asarray(LOGITS), jnp.asarray(HARD))
    np.testing.assert_array_equal(loss(jnp.asarray(LOGITS), jnp.asarray(HARD, jnp.int32)), expected)
    np.testing.assert_array_equal(loss(jnp.asarray(LOGITS), jnp.asarray(HARD, bool)), expected)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_distillation_is_torchs_divergence(temperature):
    def theirs(logits):
        student = torch.log_softmax(logits / temperature, -1)
        teacher = torch.softmax(torch.tensor(TEACHER) / temperature, -1)
        return temperature**2 * torch.nn.functional.kl_div(student, teacher, reduction="none").sum(-1)

    assert_like_torch(lambda logits: distillation(logits, jnp.asarray(TEACHER), temperature=temperature), theirs)


def test_the_teacher_gets_no_gradient_and_an_equal_student_has_no_loss():
    gradient = jax.grad(lambda teacher: jnp.sum(distillation(jnp.asarray(LOGITS), teacher)))(jnp.asarray(TEACHER))
    assert not np.any(gradient)
    assert not np.any(distillation(jnp.asarray(TEACHER), jnp.asarray(TEACHER), temperature=2.0))


VISION = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 4, "patch_size": 2}
TEXT = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
TEXT |= {"max_position_embeddings": 4, "eos_token_id": 1, "projection_size": 8}


def transformers_loss(model):
    """Its loss, its embeddings of images and of texts, and the gradients of all that goes into the loss."""
    with torch.no_grad():
        model.logit_scale.fill_(1.5)
    inputs = {"pixel_values": torch.randn(5, 3, 4, 4), "input_ids": torch.randint(2, 9, (5, 4))}
    out = model(**inputs, return_loss=True)
    scalars = [model.logit_scale, model.logit_bias] if hasattr(model, "logit_bias") else [model.logit_scale]
    gradients = torch.autograd.grad(out.loss, [out.image_embeds, out.text_embeds, *scalars])
    embeddings = [each.detach().numpy() for each in (out.image_embeds, out.text_embeds)]
    return out.loss.detach().numpy(), *embeddings, [each.numpy() for each in gradients]


def along_sphere(gradient, x):
    """Theirs is the gradient of normalised vectors; ours comes through the normalisation, which takes this part off."""
    return gradient - np.sum(gradient * x, -1, keepdims=True) * x


def test_info_nce_is_the_loss_of_clip():
    model = CLIPModel(CLIPConfig(vision_config=VISION, text_config=TEXT, projection_dim=6)).eval()
    expected, images, texts, gradients = transformers_loss(model)

    def loss(images, texts, logit_scale):
        return jnp.mean(info_nce(images, texts, jnp.exp(logit_scale)))

    given = jnp.asarray(images), jnp.asarray(texts), jnp.asarray(1.5)
    value, grads = jax.value_and_grad(loss, (0, 1, 2))(*given)
    assert_close(value, expected)
    assert_close(loss(3 * given[0], given[1] / 7, 1.5), expected)  # normalised inside
    assert_close(grads[0], along_sphere(gradients[0], images), 1e-4)
    assert_close(grads[1], along_sphere(gradients[1], texts), 1e-4)
    assert_close(grads[2], gradients[2], 1e-4)


def test_siglip_is_the_loss_of_siglip():
    model = SiglipModel(SiglipConfig(vision_config=VISION, text_config=TEXT)).eval()
    with torch.no_grad():
        model.logit_bias.fill_(-1.2)
    expected, images, texts, gradients = transformers_loss(model)

    def loss(images, texts, logit_scale, bias):
        return jnp.mean(siglip(images, texts, jnp.exp(logit_scale), bias))

    given = jnp.asarray(images), jnp.asarray(texts), jnp.asarray(1.5), jnp.asarray(-1.2)
    value, grads = jax.value_and_grad(loss, (0, 1, 2, 3))(*given)
    assert_close(value, expected)
    assert_close(loss(3 * given[0], given[1] / 7, 1.5, -1.2), expected)
    assert_close(grads[0], along_sphere(gradients[0], images), 1e-4)
    assert_close(grads[1], along_sphere(gradients[1], texts), 1e-4)
    assert_close(grads[2], gradients[2].reshape(()), 1e-4)
    assert_close(grads[3], gradients[3].reshape(()), 1e-4)


def test_contrastive_losses_are_per_example():
    def by_hand(i):
        a, b = A / np.linalg.norm(A, axis=1)[:, None], B / np.linalg.norm(B, axis=1)[:, None]
        logits = 5.0 * a @ b.T
        to_b = np.log(np.exp(logits[i]).sum()) - logits[i, i]
        to_a = np.log(np.exp(logits[:, i]).sum()) - logits[i, i]
        signs = 2 * np.eye(5)[i] - 1
        return (to_b + to_a) / 2, np.log1p(np.exp(-signs * (logits[i] - 2.0))).sum()

    expected = np.array([by_hand(i) for i in range(5)])
    assert_close(info_nce(jnp.asarray(A), jnp.asarray(B), 5.0), expected[:, 0])
    assert_close(siglip(jnp.asarray(A), jnp.asarray(B), 5.0, -2.0), expected[:, 1])


@pytest.mark.parametrize("loss", [info_nce, partial(siglip, bias=-2.0)], ids=["info_nce", "siglip"])
def test_a_pair_of_weight_0_is_nobodys_wrong_answer(loss):
    weight = jnp.array([1.0, 0, 1, 0, 0.5])
    there = np.flatnonzero(weight)
    assert np.all(np.isfinite(loss(jnp.asarray(A), jnp.asarray(B), 5.0, weight=jnp.zeros(5))))
    given = weighted_mean(loss(jnp.asarray(A), jnp.asarray(B), 5.0, weight=weight), weight)
    alone = weighted_mean(loss(jnp.asarray(A[there]), jnp.asarray(B[there]), 5.0), weight[there])
    assert_close(given, alone)
    mean = lambda a, weight: weighted_mean(loss(a, jnp.asarray(B), 5.0, weight=weight), weight)
    gradient = jax.grad(mean)(jnp.asarray(A).at[1].set(0), weight)  # as of an image that can't be read
    assert np.all(np.isfinite(gradient))
    assert np.any(gradient[0])
    assert not np.any(gradient[jnp.array([1, 3])])
    assert not np.any(jax.grad(mean)(jnp.asarray(A), jnp.zeros(5)))


@EVERY_LOSS
def test_forward_mode_and_second_derivatives(loss):
    check_grads(jax.jit(loss), (jnp.asarray(LOGITS),), order=2, modes=("fwd", "rev"), atol=0.02, rtol=0.02)


@EVERY_LOSS
def test_half_precision_is_widened_before_anything_is_computed(loss):
    half = jnp.asarray(LOGITS, jnp.bfloat16)
    losses, wide = jax.jit(loss)(half), jax.jit(loss)(half.astype(jnp.float32))
    assert losses.dtype == jnp.float32
    assert_close(losses, wide, 1e-6)
    assert jax.grad(lambda x: jnp.sum(loss(x)))(half).dtype == jnp.bfloat16


@EVERY_LOSS
def test_batch_and_classes_may_be_split_over_devices(loss):
    place = NamedSharding(make_mesh(data=4, model=2), P("data", None, "model"))
    mean = jax.jit(jax.value_and_grad(lambda x: jnp.mean(loss(x))))
    value, gradient = mean(jax.device_put(LOGITS, place))
    expected = mean(jnp.asarray(LOGITS))
    assert_close(value, expected[0])
    assert_close(gradient, expected[1])


@pytest.mark.parametrize("labels", [LABELS, SOFT], ids=["classes", "probabilities"])
def test_cross_entropy_of_large_logits_keeps_its_digits(labels):
    """Neither overflow nor an offset of all logits costs digits; what is hidden by -inf gets no gradient."""
    offset = LOGITS.round(1) * 4 + 8192  # exact in float32
    loss = jax.jit(partial(cross_entropy, smoothing=0.1))
    assert_close(loss(jnp.asarray(offset), jnp.asarray(labels)), loss(jnp.asarray(offset - 8192), jnp.asarray(labels)))
    assert np.isfinite(loss(jnp.asarray(1e30 * LOGITS), jnp.asarray(labels))).all()


def test_cross_entropy_with_classes_masked_by_minus_infinity():
    masked = jnp.asarray(LOGITS)[0].at[:, 5:].set(-jnp.inf)
    labels = jnp.asarray(LABELS[0] % 5)
    assert_close(cross_entropy(masked, labels), cross_entropy(jnp.asarray(LOGITS)[0, :, :5], labels))
    gradient = jax.grad(lambda x: jnp.sum(cross_entropy(x, labels)))(masked)
    assert np.all(np.isfinite(gradient))
    assert not np.any(gradient[:, 5:])


@pytest.mark.parametrize("label", [-100, -1, 8])
def test_a_label_that_is_no_class_gives_nan_unless_its_weight_is_0(label):
    logits, labels = jnp.asarray(LOGITS[0]), jnp.asarray([2, label, 3])
    losses = cross_entropy(logits, labels, smoothing=0.1)
    np.testing.assert_array_equal(np.isnan(losses), [False, True, False])
    weight = jnp.array([1.0, 0, 1])
    mean = jax.value_and_grad(lambda logits: weighted_mean(cross_entropy(logits, labels, smoothing=0.1), weight))
    value, gradient = mean(logits)
    assert_close(value, (losses[0] + losses[2]) / 2)
    assert np.all(np.isfinite(gradient))
    assert not np.any(gradient[1])


def test_weighted_mean_and_its_gradient():
    values, weight = jnp.array([[1.0, 2.0], [4.0, 7.0]]), jnp.array([[1.0, 0.0], [0.5, 2.0]])
    value, gradient = jax.value_and_grad(weighted_mean)(values, weight)
    assert_close(value, (1 + 2 + 14) / 3.5)
    assert_close(gradient, weight / 3.5)
    assert weighted_mean(values.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)).dtype == jnp.float32


def test_weighted_mean_of_nothing_is_0_and_has_a_finite_gradient():
    values = jnp.array([1.0, jnp.nan, jnp.inf])
    value, gradients = jax.value_and_grad(weighted_mean, (0, 1))(values[:1], jnp.zeros(1))
    assert value == 0
    assert np.all(np.isfinite(gradients))
    value, gradient = jax.value_and_grad(weighted_mean)(values, jnp.array([2.0, 0, 0]))
    assert value == 1
    np.testing.assert_array_equal(gradient, [1, 0, 0])


X = jnp.zeros((4, 3))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: cross_entropy(X, jnp.zeros((4, 1), int)), r"labels has shape \(4, 1\), expected \(4,\); give one int"),
        (lambda: cross_entropy(X, jnp.zeros((4, 1))), r"labels has shape \(4, 1\), expected \(4, 3\); give one float"),
        (lambda: cross_entropy(X, X, smoothing=10.0), r"smoothing=10.0 is no share of a label; choose it from 0 to 1"),
        (lambda: binary_cross_entropy(X, jnp.zeros(4)), r"targets has shape \(4,\), expected \(4, 3\); .*one_hot\("),
        (lambda: focal(X, jnp.zeros((4, 1))), r"focal: targets has shape \(4, 1\), expected \(4, 3\); give one target"),
        (lambda: focal(X, X, alpha=-1.0), r"alpha=-1.0 is no share of the weight; choose it from 0 to 1"),
        (
            lambda: distillation(X, jnp.zeros((4, 1))),
            r"teacher_logits has shape \(4, 1\), expected \(4, 3\); the teach",
        ),
        (lambda: distillation(X, X, temperature=0.0), r"temperature=0.0 is not positive; choose 1.0 or higher"),
        (lambda: info_nce(X, X[:1], 1.0), r"info_nce: b has shape \(1, 3\), expected \(4, 3\); give one b for each a"),
        (lambda: siglip(X, X[:1], 1.0, 0.0), r"siglip: b has shape \(1, 3\), expected \(4, 3\); give one b for each a"),
        (lambda: info_nce(X, X, 1.0, X), r"weight has shape \(4, 3\), expected \(4,\); give one weight for each pair"),
        (lambda: weighted_mean(X, jnp.zeros(4)), r"weight has shape \(4,\), expected \(4, 3\); give one weight for ea"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_remedy(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
