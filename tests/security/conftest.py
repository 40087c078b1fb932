"""The same ladder of fixtures up to a real machine."""

from tests.functional.conftest import *  # noqa: F403 - all that is named there
