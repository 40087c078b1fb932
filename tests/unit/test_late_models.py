"""A server that starts leaves building models to their first use."""

from pydantic import BaseModel, TypeAdapter

from mcp_sandbox.late_models import models_built_later


def test_models_and_adapters_are_built_at_their_first_use():
    with models_built_later():

        class Point(BaseModel):
            x: int

        adapter = TypeAdapter[Point | None](Point | None)
    assert not Point.__pydantic_complete__
    assert not adapter.pydantic_complete
    assert adapter.validate_python({"x": "1"}) == Point(x=1)
    assert adapter.pydantic_complete


def test_models_that_are_defined_later_are_built_at_once():
    with models_built_later():
        pass

    class Point(BaseModel):
        x: int

    assert Point.__pydantic_complete__
    assert TypeAdapter(Point | None).pydantic_complete
