"""What is published at /openapi.json: the routes as they are."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI


def describe(app: FastAPI, with_keys: bool) -> None:
    """Make `app` publish a description in which wrong requests are answered as they are here, by 400 and not
    422, and keys are asked for if they are."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = made()
            for operations in schema["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
            for unused in ("HTTPValidationError", "ValidationError"):
                schema.get("components", {}).get("schemas", {}).pop(unused, None)
            if with_keys:
                schemes = schema.setdefault("components", {}).setdefault("securitySchemes", {})
                schemes["key"] = {"type": "http", "scheme": "bearer"}
                schema["security"] = [{"key": []}]
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's manual says it is done
