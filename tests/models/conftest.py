"""What the tests of several families need."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def saved(tmp_path) -> Callable[..., Path]:
    """Writes a model as transformers does, and changes its config.json."""

    def save(upstream: Any, changes: dict[str, Any] | None = None, **options: Any) -> Path:
        upstream.save_pretrained(tmp_path / "upstream", **options)
        file = tmp_path / "upstream" / "config.json"
        config = {**json.loads(file.read_text()), **(changes or {})}
        file.write_text(json.dumps({name: value for name, value in config.items() if value != "absent"}))
        return tmp_path / "upstream"

    return save
