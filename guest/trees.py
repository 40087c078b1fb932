"""Directory trees of any depth: neither Python's recursion limit nor the system's limit on paths applies."""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH102, PTH110, PTH118

import os
from contextlib import suppress

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def make_folders(path: str) -> None:
    """Create a directory and its missing parents, as `os.makedirs` does. Raises OSError."""
    missing: list[str] = []
    while not os.path.exists(path):
        path, name = os.path.split(path)
        missing.append(name)
    while missing:
        path = os.path.join(path, missing.pop())
        with suppress(FileExistsError):  # another process was faster
            os.mkdir(path)


def empty_folder(path: str) -> None:
    """Remove everything in a directory, without following links. What cannot be removed stays.

    Subdirectories are moved up into the directory and emptied there, one after the other, so that one descriptor at a
    time is enough.
    """
    top = os.open(path, FOLDER)
    try:
        prefix = os.urandom(8).hex()  # of the names of what is moved: nothing has one of them yet
        moved = 0
        folders = _remove_files(top)
        while folders:
            name = folders.pop()
            with suppress(OSError):
                folder = os.open(name, FOLDER, dir_fd=top)
                try:
                    for inner in _remove_files(folder):
                        moved += 1
                        os.rename(inner, f"{prefix}-{moved}", src_dir_fd=folder, dst_dir_fd=top)
                        folders.append(f"{prefix}-{moved}")
                finally:
                    os.close(folder)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)


def _remove_files(folder: int) -> list[str]:
    """Remove the files in a directory; returns the names of its subdirectories, which can be opened now."""
    names: list[str] = []
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        with suppress(OSError):
            if is_folder:
                os.chmod(name, 0o700, dir_fd=folder)
                names.append(name)
            else:
                os.unlink(name, dir_fd=folder)
    return names
