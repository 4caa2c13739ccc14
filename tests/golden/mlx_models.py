"""How the `model-*` files in `mlx-lm` were made: models of mlx-lm read ids, and their caches were saved.

`python mlx_models.py CHECKPOINT OUT IDS`, of the checkpoints that `tests.exact.members.folder` makes, in an
environment with mlx-lm and blake3. The file says which weights they were: another torch may draw others.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import mlx.core as mx
from blake3 import blake3
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache


def main() -> None:
    folder, out, ids = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    config = json.loads((folder / "config.json").read_text())
    # mlx-lm asks for these by the names that they had before.
    for name, value in config.get("rope_parameters", {}).items():
        config.setdefault(name, value)
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    path = folder / "model.safetensors"
    weights = mx.load(str(path))
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    model.load_weights(list(weights.items()))
    cache = make_prompt_cache(model)
    model(mx.array([ids[:-2]]), cache=cache)
    for token in ids[-2:]:
        model(mx.array([[token]]), cache=cache)
    said = {"tokens": json.dumps(ids), "weights": blake3(path.read_bytes()).hexdigest()}
    save_prompt_cache(out, cache, said)


if __name__ == "__main__":
    main()
