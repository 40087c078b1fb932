"""Which template has the Python module that a run did not find."""

import re
from typing import TypeVar

from mcp_sandbox.views import MissingModule, RunProgress, RunView
from templates.catalogue import Catalogue
from templates.modules import distribution_of, version_in

_NAME = "ModuleNotFoundError"
_MESSAGE = re.compile(r"No module named '([A-Za-z_][\w.]{0,99})'", re.ASCII)
_Result = TypeVar("_Result", RunView, RunProgress, RunView | RunProgress)


def with_missing_module(result: _Result, template: str, catalogue: Catalogue) -> _Result:
    """Return a result of a sandbox of `template`, with the templates that have what its code could not import."""
    if isinstance(result, RunProgress):
        done = result.result and with_missing_module(result.result, template, catalogue)
        return result.model_copy(update={"result": done})
    module = _missing_in(result)
    if module is None:
        return result
    distribution = distribution_of(module)
    versions = {name: version_in(known, distribution) for name, known in catalogue.templates().items()}
    if versions.pop(template, None) is not None:
        return result  # a part of a package that is there
    found = {name: f"{distribution} {version}".rstrip() for name, version in versions.items() if version is not None}
    return result.model_copy(update={"missing_module": MissingModule(module=module, templates=found)})


def _missing_in(run: RunView) -> str | None:
    """Return the module that ended the run's code, or a program that a command ran."""
    if run.error is not None:
        found = _MESSAGE.search(run.error.message) if run.error.name == _NAME else None
        return found[1] if found else None
    if run.status == "ok" or not run.exit_code:
        return None
    lines = [line for line in (run.stderr.tail or run.stderr.head).splitlines() if line.startswith(_NAME)]
    found = _MESSAGE.search(lines[-1]) if lines else None
    return found[1] if found else None
