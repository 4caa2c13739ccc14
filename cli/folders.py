"""Where things live on this machine, if nothing else is said."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def default_store() -> Path:
    """Where conversations live if nothing else is said."""
    return platformdirs.user_data_path("tenuto") / "sessions"


def keys_folder() -> Path:
    """Where keys are if nothing else is said: apart from conversations, and from their backups."""
    return platformdirs.user_config_path("tenuto") / "keys"


def cache_folder() -> Path:
    """What can be fetched or computed again: models, tokenizers, and which model a digest means."""
    return platformdirs.user_cache_path("tenuto")


def models_folder() -> Path:
    """Where fetched models are kept; TENUTO_MODELS names another place."""
    chosen = os.environ.get("TENUTO_MODELS")
    return Path(chosen).expanduser() if chosen else cache_folder() / "models"
