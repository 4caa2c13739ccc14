"""What becomes of each field of a request of OpenAI's: it is used; or changes nothing; or asks for something
that is not offered, and is refused by name unless its value asks for nothing.

A field that is in no request here is refused, too: nobody knows what it would change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512


class Request(BaseModel):
    """A body: exact types, and no field that is not known. Null is the same as nothing."""

    model_config = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, slots=True)
class Ignored:
    """Whatever it says, the reply is the same."""


class Neutral:
    """These values, and null, ask for nothing; any other one is refused."""

    def __init__(self, *values: Any) -> None:
        self.values = (None, *values)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"enum": list(self.values)}

    def _check(self, value: Any) -> Any:
        if any(value == each and type(value) is type(each) for each in self.values):
            return value
        raise PydanticCustomError("unsupported", "this is not supported")


#: A field that is ignored.
Nothing = Annotated[Any, Ignored()]

Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=MAX_KEY)],
        Annotated[str, Field(max_length=MAX_VALUE)],
    ],
    Field(max_length=MAX_PAIRS),
]
#: What is said back, and means nothing here.
Label = Annotated[str, Field(max_length=256)]


def fates(model: type[BaseModel]) -> dict[str, str]:
    """What becomes of each field, for the documentation."""
    found = {}
    for name, field in model.model_fields.items():
        fate = "used"
        for rule in field.metadata:
            if isinstance(rule, Ignored):
                fate = "ignored"
            if isinstance(rule, Neutral):
                fate = "refused"
        found[name] = fate
    return found
