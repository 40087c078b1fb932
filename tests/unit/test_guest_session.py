"""What one shell passes on to the next, with every shell of this host."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from guest.agent.shell_session import (
    MAX_ARGUMENT,
    MAX_RECORD,
    ORDER_FD,
    RECORD_FD,
    TOO_LARGE,
    WAITING,
    Call,
    Session,
    parse_call,
)
from guest.environment import difference
from guest.errors import RequestRefused

FOUND = {"bash": ["bash"], "dash": ["dash"], "busybox": ["busybox", "ash"]}
SHELLS = [pytest.param(words, id=name) for name, words in FOUND.items() if shutil.which(words[0])]
AHEAD = pytest.param(["bash"], id="bash-started-ahead")
NOTHING = Call(None, {}, b"")
GIVEN = {"PATH": os.environ["PATH"], "GIVEN": "1"}
AWKWARD = 'it\'s "two"\nlines, $HOME and `tick` \\ and ä\n'


class Sessions:
    """Runs commands one after the other, as the agent does."""

    def __init__(self, shell: list[str], folder: Path) -> None:
        self.shell = shell
        self.session = Session()
        self.session.folder = str(folder)

    def run(self, command: str, call: Call = NOTHING) -> str:
        record = os.memfd_create("record")
        folder = self.session.resolve(call.cwd)
        job = self.session.job(command, call, folder)
        environment = {"PATH": os.environ["PATH"]} if self.session.exports else GIVEN
        done = self.execute(job.arguments, environment, folder, {RECORD_FD: record})
        self.note = self.session.take(os.pread(record, MAX_RECORD + 1, 0), call)
        os.close(record)
        self.code, self.errors = done.returncode, done.stderr.decode()
        return done.stdout.decode()

    def execute(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: str, fds: Mapping[int, int]
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*self.shell, *arguments],
            env=environment,
            cwd=folder,
            close_fds=False,
            preexec_fn=lambda: [os.dup2(fd, number) for number, fd in fds.items()] and None,
            capture_output=True,
            check=False,
        )


class SessionsAhead(Sessions):
    """The same with shells that are started before their job is known, in another environment and directory."""

    def run(self, command: str, call: Call = NOTHING) -> str:
        record = os.memfd_create("record")
        reader, writer = os.pipe()
        folder = self.session.resolve(call.cwd)
        wanted = {"PATH": os.environ["PATH"]} if self.session.exports else GIVEN
        job = self.session.job(command, call, folder).written(difference({"STALE": "1"}, wanted), folder)
        os.pwrite(record, job, 0)
        os.write(writer, b"\n")
        done = self.execute(WAITING, {"STALE": "1"}, "/", {RECORD_FD: record, ORDER_FD: reader})
        self.note = self.session.take(os.pread(record, MAX_RECORD + 1, len(job)), call)
        for fd in (record, reader, writer):
            os.close(fd)
        self.code, self.errors = done.returncode, done.stderr.decode()
        return done.stdout.decode()


@pytest.fixture(params=[*SHELLS, AHEAD])
def sessions(request: pytest.FixtureRequest, tmp_path: Path) -> Sessions:
    kind = SessionsAhead if "started-ahead" in request.node.callspec.id else Sessions
    return kind(request.param, tmp_path)


def test_directory_and_exported_variables_are_passed_on(sessions: Sessions, tmp_path: Path):
    sessions.run(f"mkdir 'a b' && cd 'a b'; export X={shlex.quote(AWKWARD)}; plain=1; unset GIVEN")
    assert sessions.run("pwd") == f"{tmp_path}/a b\n"
    assert sessions.run('printf %s "$X"') == AWKWARD
    assert sessions.run('echo "${plain-gone} ${GIVEN-gone}"') == "gone gone\n"
    assert sessions.run("cd - >/dev/null; pwd") == f"{tmp_path}\n"
    assert sessions.errors == ""


def test_a_command_that_fails_or_exits_passes_its_session_on(sessions: Sessions):
    sessions.run("export X=1; cd /; false")
    assert sessions.code == 1
    sessions.run("export X=$X$X; exit 3")
    assert sessions.code == 3
    sessions.run("set -e; export X=$X$X; false; export X=never")
    assert sessions.run('echo "$X $PWD"') == "1111 /\n"


def without_source(message: str) -> str:
    """Remove what shells add to name the source of a text."""
    return message.replace("eval: ", "").replace("-c: ", "")


def test_errors_read_as_if_there_were_no_session(sessions: Sessions, tmp_path: Path):
    for command in ("cd /\nfi", "cd (", "true\nnosuchprogram"):
        bare = subprocess.run([*sessions.shell, "-c", command, "sh"], capture_output=True, check=False)
        sessions.run(command)
        assert sessions.code == bare.returncode
        assert without_source(sessions.errors) == without_source(bare.stderr.decode())


def test_a_command_sees_no_arguments_and_no_traces_of_the_session(sessions: Sessions):
    assert sessions.run('echo "$# $*"') == "0 \n"
    assert sessions.run("cat <<EOF\nhere\nEOF\n# the end") == "here\n"


def test_a_shell_that_was_started_ahead_is_like_a_new_one(tmp_path: Path):
    """Compare all variables but those that tell where and when a shell was started."""
    command = "set | grep -v -e ^BASH -e ^EPOCH -e ^PPID= -e RANDOM= -e ^SECONDS= -e ^_="
    ahead, new = SessionsAhead(["bash"], tmp_path), Sessions(["bash"], tmp_path)
    for _ in range(2):
        assert ahead.run(command) == new.run(command)
        assert ahead.run("export -p; shopt -p; set +o; trap; ulimit -a; umask; ls /proc/self/fd") == new.run(
            "export -p; shopt -p; set +o; trap; ulimit -a; umask; ls /proc/self/fd"
        )
        assert ahead.run("echo $SECONDS") == "0\n"
        assert ahead.run("export X=1; unset GIVEN; cd /usr/lib") == new.run("export X=1; unset GIVEN; cd /usr/lib")


def test_random_numbers_of_shells_that_are_copies_differ(tmp_path: Path):
    job = Session().job("", NOTHING, str(tmp_path))
    assert job.written({}, str(tmp_path)) != job.written({}, str(tmp_path))


def test_options_of_a_call_apply_to_that_call_only(sessions: Sessions, tmp_path: Path):
    sessions.run("export X=old; mkdir sub; cd /")
    assert sessions.run('echo "$X $PWD"', Call(f"{tmp_path}/sub", {"X": "it's new"}, b"")) == (
        f"it's new {tmp_path}/sub\n"
    )
    assert sessions.run('echo "$X $PWD"') == "old /\n"
    sessions.run("cd /usr; export X=changed", Call(str(tmp_path), {}, b""))
    assert sessions.run('echo "$X $PWD"; cd sub 2>/dev/null || echo no') == "changed /\nno\n"
    sessions.run("cd /usr; export X=again", Call(None, {"Y": "1"}, b""))
    assert sessions.run('echo "$X $PWD ${Y-none}"') == "changed /usr none\n"


def test_a_relative_cwd_starts_at_the_sessions_directory(sessions: Sessions, tmp_path: Path):
    sessions.run("mkdir -p a/b; cd a")
    assert sessions.run("pwd -P", Call("b", {}, b"")) == f"{tmp_path}/a/b\n"


def test_a_shell_that_execs_another_program_leaves_the_session_unchanged(sessions: Sessions):
    sessions.run("export X=1")
    sessions.run("export X=2; exec true")
    sessions.run("export X=3; trap 'echo bye' EXIT")
    assert sessions.run("echo $X") == "1\n"


def test_a_command_that_writes_to_the_session_record_leaves_the_session_unchanged(sessions: Sessions, tmp_path: Path):
    sessions.run("export X=1")
    sessions.run(f"export X=2; printf '/\\0' >&{RECORD_FD}")
    assert sessions.run('echo "$X $PWD"') == f"1 {tmp_path}\n"


def test_too_many_variables_are_not_passed_on_and_a_note_says_so(sessions: Sessions):
    sessions.run("export X=1")
    sessions.run(f"cd /; export X={'x' * 60_000}; export Y=$X")
    assert sessions.note == TOO_LARGE
    assert sessions.run('echo "$X $PWD"') == "1 /\n"


def test_a_command_or_env_that_is_too_large_is_refused():
    with pytest.raises(RequestRefused, match="write it to a file"):
        Session().job("x" * (MAX_ARGUMENT + 1), NOTHING, "/")
    with pytest.raises(RequestRefused, match="env is too large"):
        Session().job("true", Call(None, {"X": "x" * MAX_ARGUMENT}, b""), "/")


@pytest.mark.parametrize(
    "options",
    [
        {"cwd": 1},
        {"cwd": "a\0"},
        {"stdin": 1},
        {"env": [1]},
        {"env": {"a b": "1"}},
        {"env": {"A": 1}},
        {"env": {"A": "\0"}},
    ],
)
def test_invalid_options_are_refused(options):
    with pytest.raises(RequestRefused):
        parse_call(options)


def test_variables_that_change_between_commands_are_changed_in_the_next(sessions: Sessions):
    sessions.run("export OLD=1")
    sessions.session.change({"OLD": None, "NEW": AWKWARD})
    assert sessions.run('printf %s "${OLD-gone}$NEW"') == f"gone{AWKWARD}"
    assert sessions.run('printf %s "${OLD-gone}$NEW"') == f"gone{AWKWARD}"
