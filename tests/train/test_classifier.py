"""Classifiers: what training writes computes the same when it is read, and prepares pictures as training did."""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import eqzoo
from eqzoo import data
from eqzoo._facts import imagenet_classes
from eqzoo.data.augment import prepare
from eqzoo.train.classifier import Preparation, load_classifier, load_pretrained, save_classifier
from eqzoo.tree import leaves_with_paths

RESNET = {"depths": (1, 1, 1, 1), "widths": (4, 8, 8, 8), "num_classes": 3}
VIT = {"image_size": 16, "patch_size": 4, "dim": 8, "depth": 2, "heads": 2, "num_classes": 3}
INPUTS = {"image_size": 16, "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}
CLASSES = ("cat", "dog", "owl")
OWN = """
import equinox as eqx

class Net(eqx.Module):
    linear: eqx.nn.Linear
    scale: float = eqx.field(static=True)

    def __init__(self, num_classes, scales, *, key):
        self.linear = eqx.nn.Linear(768, num_classes, key=key)
        self.scale = {(2, 3): 6.0}[scales]

    def __call__(self, x, *, key=None):
        return self.scale * self.linear(x.reshape(-1))
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_classifiers.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return "own_classifiers"


def make(name, **options):
    """A model whose state too is not what it starts with."""
    model, state = eqzoo.create(name, key=jax.random.key(0), **options)
    numbers = np.random.default_rng(0)
    change = lambda leaf: leaf + jnp.asarray(numbers.uniform(size=leaf.shape), leaf.dtype)
    return jax.tree.map(lambda leaf: change(leaf) if eqx.is_inexact_array(leaf) else leaf, (model, state))


def saved(folder, name, options, **changes):
    model, state = make(name, **options)
    about = {"name": name, "options": options, "classes": CLASSES, **INPUTS} | changes
    save_classifier(folder, model, state, **about)
    return model, state


def picture(number, height, width):
    """Smooth, so that JPEG keeps it, and with a corner, so that it shows which way it is turned."""
    y, x = np.mgrid[:height, :width] / np.array([height, width])[:, None, None]
    pixels = 255 * np.stack([x, y, (x + y + number) / 2 % 1], axis=-1)
    pixels[: height // 3, : width // 4] = 20 * number
    return Image.fromarray(pixels.astype(np.uint8))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Pictures of all kinds, two to a class: large and small ones, turned, grey, transparent, with 16 bits."""
    folder = tmp_path_factory.mktemp("photos")
    for name in CLASSES:
        (folder / name).mkdir()
    turned = Image.Exif()
    turned[0x0112] = 6
    picture(1, 300, 200).save(folder / "cat" / "large.jpg")
    picture(2, 40, 90).save(folder / "cat" / "turned.jpg", exif=turned)
    picture(3, 30, 30).convert("L").save(folder / "dog" / "grey.png")
    picture(4, 9, 12).quantize(8).save(folder / "dog" / "palette.png", transparency=0)
    deep = (np.asarray(picture(5, 20, 20).convert("L")).astype(np.uint16) << 8) + 7
    Image.fromarray(deep).save(folder / "owl" / "deep.png")
    picture(6, 16, 16).save(folder / "owl" / "fits.webp", lossless=True)
    return folder


def as_trained(images):
    """What the training's step gets."""
    batch = jax.tree.map(jnp.asarray, images.read(np.arange(len(images))))
    return np.asarray(prepare(batch, mean=INPUTS["mean"], std=INPUTS["std"])["image"])


def test_a_run_prepares_photographs_as_its_training_did(photos):
    images = data.load_image_folder(photos, image_size=16)
    prepared = images.prepared(Preparation(**INPUTS)).read(np.arange(6))
    assert prepared["image"].dtype == np.float32
    np.testing.assert_allclose(prepared["image"], as_trained(images), atol=1e-5)
    assert prepared["label"].tolist() == [0, 0, 1, 1, 2, 2]
    assert prepared["weight"].tolist() == [1] * 6
    spread = prepared["image"].reshape(6, -1).std(axis=1)
    assert spread.min() > 0.1  # the pictures have something in them


@pytest.mark.parametrize("size", [8, 16, 21])
def test_a_run_prepares_pixels_in_memory_as_its_training_did(size):
    images, _ = data.load_images("digits", image_size=size)
    images = dataclasses.replace(images, labels=images.labels[:20])
    preparation = Preparation(**INPUTS | {"image_size": size})
    prepared = images.prepared(preparation).read(np.arange(20))["image"]
    np.testing.assert_allclose(prepared, as_trained(images), atol=1e-5)


def test_what_cannot_be_read_has_no_weight_and_leaves_the_others(photos, tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "a.png").write_bytes((photos / "dog" / "grey.png").read_bytes())
    (tmp_path / "cat" / "b.png").write_bytes((photos / "dog" / "grey.png").read_bytes()[:100])
    source = data.load_image_folder(tmp_path, image_size=16).prepared(Preparation(**INPUTS))
    read = source.read(np.array([1, 0, 1]))
    assert read["weight"].tolist() == [0, 1, 0]
    assert not read["image"][0].any()
    assert read["image"][1].any()
    assert source.read(np.zeros(0, int))["image"].shape == (0, 16, 16, 3)
    assert source.name(1).endswith("b.png")
    assert len(source) == 2


@pytest.mark.parametrize(("name", "options"), [("resnet18", RESNET), ("vit_tiny_patch16_224", VIT)])
def test_what_is_read_computes_what_was_written(name, options, tmp_path):
    model, state = saved(tmp_path, name, options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["classifier.json", "model.safetensors"]
    classifier = load_classifier(tmp_path)
    assert classifier.classes == CLASSES
    assert classifier.prepare == Preparation(**INPUTS)
    image = classifier.prepare(picture(1, 50, 40))
    expected = eqzoo.freeze(model, state)(jnp.asarray(image))
    assert np.array_equal(classifier.model(jnp.asarray(image)), expected)


def test_a_class_of_the_user_is_made_with_its_options_again(own, tmp_path):
    options = {"num_classes": 3, "scales": (2, 3)}
    model, state = saved(tmp_path, f"{own}:Net", options)
    assert eqx.tree_equal(load_classifier(tmp_path).model, eqzoo.freeze(model, state))


def test_an_option_that_is_no_literal_is_refused_before_anything_is_written(tmp_path):
    model, state = make("mlp", in_channels=3)
    with pytest.raises(ValueError, match="option dtype=.* of mlp can't be written"):
        save_classifier(tmp_path, model, state, name="mlp", options={"dtype": jnp.ones}, classes=CLASSES, **INPUTS)
    assert not list(tmp_path.iterdir())


def exported(folder, classes):
    model, state = make("resnet18", **RESNET | {"num_classes": classes})
    eqzoo.export(folder, model, state, format="timm")
    return folder


@pytest.fixture(scope="module")
def upstreams(tmp_path_factory):
    return exported(tmp_path_factory.mktemp("timm") / "model", 4)


def test_upstreams_model_comes_with_upstreams_preprocessing(upstreams, photos):
    classifier = load_classifier(upstreams)
    assert classifier.classes == ("class 0", "class 1", "class 2", "class 3")
    assert eqx.tree_equal(classifier.model, eqzoo.load(upstreams))
    pixels = np.asarray(picture(1, 50, 40))
    assert np.array_equal(classifier.prepare(pixels), eqzoo.preprocessing(upstreams)(pixels))
    turned = Image.open(photos / "cat" / "turned.jpg")
    upright = turned.transpose(Image.Transpose.ROTATE_270)
    assert np.array_equal(classifier.prepare(turned), eqzoo.preprocessing(upstreams)(upright))
    images = data.load_image_folder(photos).prepared(classifier.prepare).read(np.arange(6))
    assert images["image"].shape == (6, 224, 224, 3)
    assert images["weight"].all()
    assert np.array_equal(images["image"][1], classifier.prepare(turned))


def test_a_thousand_classes_are_imagenets(tmp_path):
    assert load_classifier(exported(tmp_path / "model", 1000)).classes == imagenet_classes()


def test_a_model_that_labels_pixels_is_no_classifier():
    with pytest.raises(ValueError, match="takes whole images, for it labels pixels; give a classifier"):
        Preparation.of("torchvision/fcn_resnet50.COCO_WITH_VOC_LABELS_V1")


def test_classes_can_be_named_by_a_file(upstreams, tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("Katze\nHund\n\nEule\nGänsegeier\n", encoding="utf-8")
    assert load_classifier(upstreams, labels=names).classes == ("Katze", "Hund", "Eule", "Gänsegeier")
    saved(tmp_path, "resnet18", RESNET)
    with pytest.raises(ValueError, match="names 4 classes, but the model has 3"):
        load_classifier(tmp_path, labels=names)


def test_a_model_without_a_head_is_no_classifier(tmp_path):
    with pytest.raises(ValueError, match="has no head that tells classes apart"):
        load_classifier(exported(tmp_path / "model", 0))


def test_a_damaged_description_says_what_is_wrong(tmp_path):
    saved(tmp_path, "resnet18", RESNET)
    file = tmp_path / "classifier.json"
    document = json.loads(file.read_text())
    file.write_text(json.dumps(document | {"mean": 0.5}))
    with pytest.raises(ValueError, match=r"classifier.json.mean is 0.5, but should be tuple\[float, ...\]"):
        load_classifier(tmp_path)
    file.write_text(json.dumps(document)[:50])
    with pytest.raises(ValueError, match="classifier.json is damaged"):
        load_classifier(tmp_path)


def test_a_run_that_is_not_finished_says_so(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="is a run that has no trained model yet"):
        load_classifier(tmp_path)


def test_a_model_of_the_zoo_gets_a_head_of_zeros(tmp_path, upstreams):
    model, state = saved(tmp_path, "resnet18", RESNET)
    for source, (old, old_state) in {
        tmp_path: (model, state),
        upstreams: eqzoo.load(upstreams, trainable=True),
    }.items():
        new, new_state = load_pretrained(source, num_classes=5, image_size=64)
        assert new.head.weight.shape == (5, 8)
        assert not new.head.weight.any()
        before = dict(leaves_with_paths(old))
        kept = [path for path, leaf in leaves_with_paths(new) if eqx.is_array(leaf) and not path.startswith("head")]
        assert kept
        assert all(np.array_equal(before[path], leaf) for path, leaf in leaves_with_paths(new) if path in kept)
        assert eqx.tree_equal(new_state, old_state)


def test_a_vit_is_adapted_to_another_size(tmp_path):
    model, _ = saved(tmp_path, "vit_tiny_patch16_224", VIT)
    same, _ = load_pretrained(tmp_path, num_classes=2, image_size=16)
    assert same.config == dataclasses.replace(model.config, num_classes=2)
    larger, _ = load_pretrained(tmp_path, num_classes=2, image_size=32)
    assert larger.config == dataclasses.replace(model.config, num_classes=2, image_size=32)
    assert larger(jnp.ones((32, 32, 3))).shape == (2,)


def test_a_class_of_the_user_gets_no_new_head(own, tmp_path):
    saved(tmp_path, f"{own}:Net", {"num_classes": 3, "scales": (2, 3)})
    with pytest.raises(ValueError, match="own_classifiers:Net: a new head is known for models of the zoo only"):
        load_pretrained(tmp_path, num_classes=5, image_size=16)


def test_training_on_prepares_images_as_training_did_before(tmp_path, upstreams):
    saved(tmp_path, "resnet18", RESNET)
    assert Preparation.of(tmp_path) == Preparation(**INPUTS)
    assert Preparation.of(tmp_path, image_size=40) == Preparation(**INPUTS | {"image_size": 40})
    stated = eqzoo.preprocessing(upstreams)
    assert Preparation.of(upstreams) == Preparation(224, stated.mean, stated.std)
    assert Preparation.of(upstreams, image_size=40).image_size == 40
    file = tmp_path / "model.safetensors"
    assert Preparation.of(file, image_size=40) == Preparation(40, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    with pytest.raises(ValueError, match="is a bare file.* give an image_size"):
        Preparation.of(file)
