"""What upstream states about its checkpoints: where they are, under which licence, how their images are prepared."""

import functools
import importlib.resources
import json
from collections.abc import Mapping
from typing import Any


def torchvision_facts() -> Mapping[str, dict[str, Any]]:
    """Facts by weights name, such as "resnet50.IMAGENET1K_V2"; the source is "torchvision/" and that name."""
    return _facts("torchvision")


def timm_facts() -> Mapping[str, dict[str, Any]]:
    """Facts by timm's name, such as "resnet50.a1_in1k"; the hub id is "timm/" and that name."""
    return _facts("timm")


def transformers_facts() -> Mapping[str, dict[str, Any]]:
    """Facts by hub id, such as "openai-community/gpt2"."""
    return _facts("transformers")


def imagenet_classes() -> tuple[str, ...]:
    """What torchvision calls ImageNet's 1000 classes, in their order."""
    return tuple(_facts("imagenet_classes"))


@functools.cache
def _facts(name: str) -> Any:
    file = importlib.resources.files("eqzoo") / "facts" / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8"))
