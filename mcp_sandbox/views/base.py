"""What all views have in common."""

from pydantic import BaseModel, ConfigDict


class View(BaseModel):
    """A frozen result. Its JSON schema is the contract: tests/unit/test_views.py notices every change to it."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")
