"""Write eqzoo/facts/torchvision.json and timm.json: what the installed torchvision and timm state about their weights;
and imagenet_classes.json: what torchvision calls ImageNet's 1000 classes.

python scripts/make_facts.py

python scripts/make_facts.py --check
"""

import argparse
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import torch

try:
    import torchvision
except RuntimeError:  # torch's CPU build lacks operators that torchvision names while it is imported
    OPERATORS = torch.library.Library("torchvision", "DEF")
    OPERATORS.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    OPERATORS.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision

import timm
from torchvision.models._meta import _IMAGENET_CATEGORIES

import eqzoo

FOLDER = Path(__file__).parents[1] / "eqzoo" / "facts"
TORCHVISION_LICENCE = "BSD-3-Clause"  # of the library; weights from elsewhere state their own


def is_known(upstream: str, architecture: str) -> bool:
    return not {architecture, f"{upstream}/{architecture}"}.isdisjoint(eqzoo.list_models())


def torchvision_facts() -> dict[str, dict[str, Any]]:
    classifiers = {"module": torchvision.models, "about": classifier_fact}
    segmenters = {"module": torchvision.models.segmentation, "about": segmenter_fact}
    return {
        f"{architecture}.{weights.name}": torchvision_fact(weights, task["about"](architecture, weights))
        for task in (classifiers, segmenters)
        for architecture in torchvision.models.list_models(module=task["module"])
        if is_known("torchvision", architecture)
        for weights in torchvision.models.get_model_weights(architecture)
    }


def classifier_fact(architecture: str, weights: Any) -> dict[str, Any]:
    accuracy = weights.meta["_metrics"]["ImageNet-1K"]
    return {"top1": accuracy["acc@1"], "top5": accuracy["acc@5"]}


def segmenter_fact(architecture: str, weights: Any) -> dict[str, Any]:
    """Its classes, how well it tells them apart, and the option with which its weights come."""
    accuracy = weights.meta["_metrics"]["COCO-val2017-VOC-labels"]
    builder = torchvision.models.get_model_builder(architecture)
    options = {"options": {"aux_loss": True}} if "aux_loss" in inspect.signature(builder).parameters else {}
    scores = {"mean_iou": accuracy["miou"], "pixel_accuracy": accuracy["pixel_acc"]}
    return {**scores, "classes": weights.meta["categories"], **options}


def torchvision_fact(weights: Any, about: dict[str, Any]) -> dict[str, Any]:
    preprocessing = weights.transforms()
    (crop_size,) = getattr(preprocessing, "crop_size", [None])
    (resize_size,) = preprocessing.resize_size
    return {
        "url": weights.url,
        "sha256": Path(weights.url).stem.rpartition("-")[2],
        "licence": weights.meta.get("license", TORCHVISION_LICENCE),
        **about,
        "parameters": weights.meta["num_params"],
        "min_size": weights.meta["min_size"],
        "preprocessing": {
            "crop_size": crop_size,
            "resize_size": resize_size,
            "interpolation": preprocessing.interpolation.value,
            "mean": preprocessing.mean,
            "std": preprocessing.std,
            "antialias": preprocessing.antialias,
        },
    }


def timm_facts() -> dict[str, dict[str, Any]]:
    facts = {}
    for name in timm.list_pretrained():
        stated = timm.get_pretrained_cfg(name)
        if stated and stated.hf_hub_id == f"timm/{name}" and is_known("timm", name.partition(".")[0]):
            facts[name] = timm_fact(stated)
    return facts


def timm_fact(stated: Any) -> dict[str, Any]:
    paper = {"paper": stated.paper_ids.removeprefix("arXiv:")} if stated.paper_ids else {}
    preprocessing = {key: getattr(stated, key) for key in ("input_size", "crop_pct", "crop_mode", "interpolation")}
    preprocessing |= {"mean": stated.mean, "std": stated.std}
    for key in ("test_input_size", "test_crop_pct"):
        if getattr(stated, key) is not None:
            preprocessing[key] = getattr(stated, key)
    return {"licence": stated.license, "num_classes": stated.num_classes, **paper, "preprocessing": preprocessing}


def as_json(facts: dict[str, dict[str, Any]]) -> str:
    """One source a line, so that a difference shows which source changed."""
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(facts[name])}" for name in sorted(facts)) + "\n}\n"


def files() -> dict[Path, str]:
    """What each file should hold."""
    return {
        FOLDER / "torchvision.json": as_json(torchvision_facts()),
        FOLDER / "timm.json": as_json(timm_facts()),
        FOLDER / "imagenet_classes.json": json.dumps(_IMAGENET_CATEGORIES, indent=0) + "\n",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file would change")
    check = parser.parse_args().check
    for path, text in files().items():
        if check and (not path.exists() or path.read_text(encoding="utf-8") != text):
            sys.exit(f"{path} is out of date; run python scripts/make_facts.py")
        if not check:
            path.write_text(text, encoding="utf-8")
            print(f"{path}: {len(text.splitlines()) - 2} entries")


if __name__ == "__main__":
    main()
