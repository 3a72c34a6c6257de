"""A model's options on the command line."""

import ast
from collections.abc import Mapping
from typing import Any

from eqzoo._model import option_names


def model_options(name: str, given: Mapping[str, str], **fitting: Any) -> dict[str, Any]:
    """What to `create` a model with: the options `given` as text, and of those that would fit the data the ones that
    the model has.

    ```python
    model_options("mlp", {"hidden": "(64, 64)"}, num_classes=10, vocab=256)  # {'num_classes': 10, 'hidden': (64, 64)}
    ```
    """
    known = option_names(name)
    return {option: value for option, value in fitting.items() if option in known} | {
        option: _value(text) for option, text in given.items()
    }


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text  # a word
