"""Make one attack and print its attempts as one line of JSON: `python3 -m inside TOPIC ATTACK ARGUMENTS`."""

# ruff: noqa: T201 - the self-test on the host reads this program's stdout

import importlib
import json
import sys


def attack(topic: str, name: str, arguments: str) -> None:
    """Make an attack, with its arguments as a JSON array."""
    module = importlib.import_module(f"{__package__}.{topic}")
    print(json.dumps(getattr(module, name)(*json.loads(arguments)).as_json()))


if __name__ == "__main__":
    attack(*sys.argv[1:4])
