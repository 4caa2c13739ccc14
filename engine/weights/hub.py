"""`hf:OWNER/REPO[/FILE]`: a model on the Hugging Face hub, where `huggingface_hub` and a network exist."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.errors import DownloadFailed, ModelNotFound

PREFIX = "hf:"
_FOLDER_FILES = (
    "*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True, slots=True)
class HubName:
    """`file` is a GGUF file of the repository; None means all that a folder of safetensors needs."""

    repo: str
    file: str | None

    @classmethod
    def parsed(cls, text: str) -> HubName:
        """Raises ModelNotFound for what is not OWNER/REPO or OWNER/REPO/FILE.gguf, with or without "hf:"."""
        owner, _, rest = text.removeprefix(PREFIX).partition("/")
        repo, _, file = rest.partition("/")
        if not owner or not repo or (file and not file.endswith(".gguf")):
            raise ModelNotFound(f"{text!r} names no model: write hf:OWNER/REPO or hf:OWNER/REPO/FILE.gguf")
        return cls(f"{owner}/{repo}", file or None)


def download(name: HubName) -> Path:
    """The file or the folder, from the hub's own cache where it is there already.

    Raises ModelNotFound where the hub has no such repository or file, DownloadFailed for all else.
    """
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise DownloadFailed(
            "hf: names need the package huggingface_hub (pip install 'tenuto[hf]')"
        ) from None
    try:
        if name.file is not None:
            return Path(huggingface_hub.hf_hub_download(name.repo, name.file))
        return Path(huggingface_hub.snapshot_download(name.repo, allow_patterns=list(_FOLDER_FILES)))
    except errors.LocalEntryNotFoundError as error:
        raise DownloadFailed(f"{name.repo}: the hub cannot be reached") from error
    except (errors.RepositoryNotFoundError, errors.EntryNotFoundError, errors.HFValidationError) as error:
        raise ModelNotFound(f"the hub has no {name.repo}{f'/{name.file}' if name.file else ''}") from error
    except Exception as error:  # the client lets errors of several HTTP libraries through
        raise DownloadFailed(f"{name.repo} could not be downloaded: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
