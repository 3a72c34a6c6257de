"""Finetuning, evaluating and predicting as a user does: the scripts on small photographs."""

import json
import os
import re
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import eqzoo
from eqzoo.train import load_classifier, save_classifier
from eqzoo.tree import leaves_with_paths
from tests.scripts import SCRIPTS, load_script

CLASSES = ("blue", "green", "red")
RESNET = {"depths": (1, 1, 1, 1), "widths": (4, 4, 8, 8), "num_classes": 5}
ADAPTERS = ("--lora-rank", 1, "--image-size", 16, "--ema", 0.5)
ROOT = SCRIPTS.parent


def run(script, *options, cwd, devices=1):
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), *map(str, options)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(tree):
    return {path: np.asarray(leaf) for path, leaf in leaves_with_paths(tree) if eqx.is_array(leaf)}


def prepared(classifier, file):
    with Image.open(file) as picture:
        return jnp.asarray(classifier.prepare(picture))


def moved(before, after):
    """The paths of the numbers that are others now."""
    before, after = numbers(before), numbers(after)
    assert before.keys() == after.keys()
    return {path for path in before if not np.array_equal(before[path], after[path])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the scripts run. Its photographs are a class's colour and much noise."""
    folder = tmp_path_factory.mktemp("finetune")
    draw = np.random.default_rng(0)
    for part, count in (("train", 16), ("val", 8)):
        for index, name in enumerate(CLASSES):
            (folder / "photos" / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 200, (30, 40, 3))
                pixels[..., 2 - index] += 55
                Image.fromarray(pixels.astype(np.uint8)).save(folder / "photos" / part / name / f"{number}.jpg")
    return folder


@pytest.fixture(scope="module")
def pretrained(folder):
    """A small model with statistics, in all forms that scripts take: a bare file, the folder of a run, upstream's."""
    model, state = eqzoo.create("resnet18", key=jax.random.key(0), **RESNET)
    images = jax.random.normal(jax.random.key(1), (8, 16, 16, 3))
    forward = lambda image: eqzoo.apply(model, state, image)
    _, state = eqx.filter_jit(jax.vmap(forward, axis_name="batch", out_axes=(0, None)))(images)
    eqzoo.save(folder / "model.safetensors", model, state)
    (folder / "run").mkdir()
    inputs = {"image_size": 16, "mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}
    save_classifier(folder / "run", model, state, name="resnet18", options=RESNET, classes="abcde", **inputs)
    eqzoo.export(folder / "upstream", model, state, format="timm")
    return model, state


def finetune(folder, source, how, name, *options, devices=1):
    shared = ("--data", "photos", "--batch-size", 16, "--epochs", 2, "--learning-rate", 0.02, "--schedule", "constant")
    named = ("--model", source, "--how", how, "--name", name) if name else ()
    return run("finetune", *named, *shared, *options, cwd=folder, devices=devices)


def result(folder, name):
    return eqzoo.load(folder / "runs" / name / "model.safetensors", trainable=True)


def in_checkpoint(folder, name):
    """What a checkpoint of the run holds of the model."""
    about = json.loads((folder / "runs" / name / "checkpoints" / "6" / "about.json").read_text())
    return {path.removeprefix("model.") for path in about["arrays"] if path.startswith("model.")}


@pytest.fixture(scope="module")
def full(folder, pretrained):
    return finetune(folder, "model.safetensors", "full", "full", "--image-size", 16)


def test_full_moves_everything(folder, pretrained, full):
    model, state = pretrained
    new, new_state = result(folder, "full")
    parameters = set(numbers(eqx.filter(model, eqx.is_inexact_array)))
    assert new.head.weight.shape == (3, 8)
    head = {"head.weight", "head.bias"}
    assert moved(eqx.tree_at(lambda m: m.head, model, new.head), new) == parameters - head
    assert new.head.weight.any()
    assert len(moved(state, new_state)) == len(numbers(state))
    assert in_checkpoint(folder, "full") == parameters


@pytest.fixture(scope="module")
def probe(folder, pretrained):
    return finetune(folder, "run", "probe", "probe")


def test_probe_moves_the_head_alone(folder, pretrained, probe):
    model, state = pretrained
    new, new_state = result(folder, "probe")
    assert moved(eqx.tree_at(lambda m: m.head, model, new.head), new) == set()
    assert moved(state, new_state) == set()
    assert new.head.weight.any()
    assert new.head.bias.any()
    assert in_checkpoint(folder, "probe") == {"head.weight", "head.bias"}
    assert "27 of " in probe  # 3 x 8 weights and 3 biases


@pytest.fixture(scope="module")
def lora(folder, pretrained):
    return finetune(folder, "upstream", "lora", "lora", *ADAPTERS, devices=2)


def test_lora_moves_matrices_by_its_rank_and_the_head(folder, pretrained, lora):
    model, state = pretrained
    new, new_state = result(folder, "lora")
    assert moved(state, new_state) == set()
    changed = moved(eqx.tree_at(lambda m: m.head, model, new.head), new)
    convolutions = {path for path, leaf in numbers(model).items() if leaf.ndim >= 4}
    assert changed == convolutions
    for path in changed:
        change = numbers(new)[path] - numbers(model)[path]
        for layer in change.reshape(-1, *change.shape[-4:]):
            first, second = np.linalg.svd(layer.reshape(len(layer), -1), compute_uv=False)[:2]
            assert second < 1e-4 * first
    assert new.head.bias.any()
    factors = {f"{path.removesuffix('.weight')}.{factor}" for path in convolutions for factor in ("down", "up")}
    assert in_checkpoint(folder, "lora") == factors | {"head.weight", "head.bias"}


def test_a_run_goes_on_where_it_was(folder):
    options = {"hidden": (8, 8), "image_size": 16, "in_channels": 3, "num_classes": 2}
    model, state = eqzoo.create("mlp", key=jax.random.key(0), **options)
    eqzoo.save(folder / "mlp.safetensors", model, state)
    options = ("mlp.safetensors", "lora")
    finetune(folder, *options, "whole", *ADAPTERS, "--warmup", 0)
    finetune(folder, *options, "half", *ADAPTERS, "--warmup", 0, "--epochs", 1)
    run("finetune", "--resume", "runs/half", "--epochs", 2, cwd=folder)
    (first, last), resumed = records(folder, "whole"), records(folder, "half")
    assert resumed == [first, last]
    assert first["test"]["loss"] != last["test"]["loss"]
    assert eqx.tree_equal(result(folder, "half"), result(folder, "whole"))


def records(folder, name):
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    kept = ("step", "train", "test")
    return [{key: record[key] for key in kept} for record in map(json.loads, lines) if "test" in record]


def best_scores(folder, name):
    """Of the model that was kept: the last of those with the highest accuracy."""
    return max((record["test"] for record in reversed(records(folder, name))), key=lambda test: test["accuracy"])


@pytest.fixture(scope="module")
def trained(folder):
    model = ("--model", "mlp", "--options", "hidden", "(8,)", "in_channels", "3")
    return run(
        *("train_classifier", *model, "--data", "photos", "--image-size", 16, "--batch-size", 16, "--epochs", 2),
        *("--name", "trained"),
        cwd=folder,
    )


def looked_at(file):
    with Image.open(file) as picture:
        picture.load()
        return picture.size


def scores_of(folder):
    return json.loads((folder / "scores.json").read_text())


def test_evaluate_gives_the_accuracy_of_the_training(folder, trained):
    out = run("evaluate", "--model", "runs/trained", "--data", "photos", "--batch-size", 7, cwd=folder)
    evaluation, expected = folder / "runs" / "trained" / "evaluation", best_scores(folder, "trained")
    scores = scores_of(evaluation)
    assert scores["accuracy"] == expected["accuracy"]
    assert scores["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert 0 < scores["calibration error"] < 1
    assert "top-5 accuracy" not in scores  # of three classes
    assert f"accuracy  {expected['accuracy']:.2%}" in out
    assert "24 images of 3 classes\n" in out
    for picture in ("confusion.png", "reliability.png", "samples.png"):
        assert looked_at(evaluation / picture) > (300, 100)


def test_evaluate_takes_a_labelled_folder_and_any_model(folder, full):
    options = ("--data", "photos/val", "--all", "--output", "elsewhere", "--batch-size", 8)
    run("evaluate", "--model", "runs/full", *options, cwd=folder, devices=2)
    expected = best_scores(folder, "full")
    assert scores_of(folder / "elsewhere")["accuracy"] == expected["accuracy"]


def test_evaluate_prepares_images_for_upstreams_model_as_upstream_does(folder, pretrained):
    (folder / "names.txt").write_text("\n".join(["red", "x", "green", "y", "blue"]))
    options = ("--data", "photos", "--labels", "names.txt", "--output", "upstreams")
    run("evaluate", "--model", "upstream", *options, cwd=folder)
    classifier = load_classifier(folder / "upstream", labels=folder / "names.txt")
    files = sorted((folder / "photos" / "val").glob("*/*.jpg"))
    images = jnp.stack([prepared(classifier, file) for file in files])
    logits = eqx.filter_jit(eqx.filter_vmap(classifier.model))(images)
    labels = np.array([classifier.classes.index(file.parent.name) for file in files])
    expected = -np.mean(np.asarray(jax.nn.log_softmax(logits))[np.arange(24), labels])
    assert scores_of(folder / "upstreams")["loss"] == pytest.approx(expected, rel=1e-4)


def test_classes_are_matched_by_name_or_else_by_order():
    matched = load_script("evaluate").matched
    indices, remark = matched(("dog", "cat"), ("cat", "cow", "dog"))
    assert indices.tolist() == [2, 0]
    assert remark == ""
    indices, remark = matched(("n01", "n02"), ("cat", "dog"))
    assert indices.tolist() == [0, 1]
    assert remark == ", by their order: n01 is cat, and so on"
    with pytest.raises(ValueError, match="2 classes are not the model's 3, such as cat: there is no fox"):
        matched(("dog", "fox"), ("cat", "cow", "dog"))


def test_the_worst_classes_come_first():
    confusion = np.array([[8, 2, 0], [0, 5, 0], [1, 3, 0]], np.float64)
    lines = load_script("evaluate").worst_classes(confusion, ("cat", "dog", "guinea pig")).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["guinea", "pig", "4", "0.0%", "dog"],
        ["cat", "10", "80.0%", "dog"],
    ]
    assert "no image" in load_script("evaluate").worst_classes(np.diag([1.0, 2.0]), ("cat", "dog"))


def test_predict_says_and_draws_what_the_model_sees(folder, full):
    photos = ["photos/val/red/0.jpg", "photos/val/blue/0.jpg"]
    out = run("predict", *photos, "--model", "runs/full", "--output", "seen.png", cwd=folder)
    classifier = load_classifier(folder / "runs" / "full")
    for photo in photos:
        probabilities = np.asarray(jax.nn.softmax(classifier.model(prepared(classifier, folder / photo))))
        said = re.search(rf"{photo}\n((?:  .*\n)+)", out)[1]
        said = re.findall(r"([\d.]+)%  (\w+)", said)
        assert [name for _, name in said] == [CLASSES[index] for index in np.argsort(-probabilities)]
        assert [float(percent) for percent, _ in said] == pytest.approx(100 * np.sort(probabilities)[::-1], abs=0.06)
    assert looked_at(folder / "seen.png") > (500, 400)


def test_predict_names_a_photo_that_it_cannot_read(tmp_path):
    (tmp_path / "photo.jpg").write_bytes(b"no photo")
    with pytest.raises(ValueError, match=r"photo.jpg can't be read as an image"):
        load_script("predict").read(tmp_path / "photo.jpg", np.asarray)


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("finetune", ("--model", "--how", "--lora-rank", "--layer-decay", "--image-size", "--resume", "--flip")),
        ("evaluate", ("--model", "--data", "--all", "--labels", "--output", "--mesh")),
        ("predict", ("PHOTO", "--model", "--labels", "--top", "--output")),
    ],
)
def test_help_explains_every_option(script, options, tmp_path):
    out = run(script, "--help", cwd=tmp_path)
    assert [option for option in options if option not in out] == []
