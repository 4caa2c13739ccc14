"""The list of models has the one that there is."""

from __future__ import annotations

import openai
import pytest

from tests.sessions.service.openai.conftest import MODEL, House


def test_the_model_is_listed_and_found_by_its_name(house: House) -> None:
    (model,) = house.api.models.list()
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "tenuto")
    found = house.api.models.retrieve(MODEL)
    assert found.id == MODEL
    assert found.n_ctx == 1024


@pytest.mark.parametrize("name", ["gpt-4o", "a/b", "../x", "x" * 1025])
def test_another_one_is_not_found(house: House, name: str) -> None:
    with pytest.raises((openai.NotFoundError, openai.BadRequestError)):
        house.api.models.retrieve(name)
