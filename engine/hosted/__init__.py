"""Models of transformers as engines: `host.host`. Whoever does not import this needs no transformers."""

from engine.errors import Unsupported

try:
    import transformers.cache_utils  # noqa: F401
except ImportError as error:
    raise Unsupported(
        "models of transformers need that package, 5.23 or later (pip install 'tenuto[transformers]')"
    ) from error
