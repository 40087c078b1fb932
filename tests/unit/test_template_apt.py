"""Which of the host's apt sources are used for images."""

from pathlib import Path

from templates.apt_sources import host_codename, sources_for

# The names of mirrors here are made up on purpose.
DEB822 = """\
Types: deb
# a remark with Suites: in it
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates bookworm-backports
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://vendor.example/apt
Suites: stable
Components: main

Types: deb
URIs: http://old.example/debian
Suites: bookworm
Components: main
Enabled: no

Types: deb-src
URIs: http://mirror.example/sources
Suites: bookworm
Components: main
"""


def etc(root: Path, *, ident: str = "debian", deb822: str = "", one_line: str = "") -> Path:
    (root / "apt/sources.list.d").mkdir(parents=True)
    (root / "os-release").write_text(f'PRETTY_NAME="X"\nID={ident}\nVERSION_CODENAME=bookworm\n')
    (root / "apt/sources.list.d/debian.sources").write_text(deb822)
    (root / "apt/sources.list").write_text(one_line)
    return root


def test_only_the_hosts_debian_mirror_is_used(tmp_path: Path):
    assert sources_for("bookworm", etc(tmp_path, deb822=DEB822)) == (
        "Types: deb\n"
        "URIs: http://mirror.example/debian\n"
        "Suites: bookworm bookworm-updates\n"
        "Components: main\n"
        "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
    )


def test_the_hosts_mirror_serves_other_suites_too(tmp_path: Path):
    text = sources_for("trixie", etc(tmp_path, deb822=DEB822))
    assert text is not None
    assert "Suites: trixie trixie-updates\n" in text


def test_one_line_sources_are_read(tmp_path: Path):
    lines = (
        "# deb http://no.example/debian bookworm main\n"
        "deb [arch=amd64 signed-by=/k.gpg] http://mirror.example/debian bookworm main non-free # remark\n"
        "deb http://mirror.example/debian-security bookworm-security main\n"
        "deb-src http://mirror.example/debian bookworm main\n"
    )
    text = sources_for("bookworm", etc(tmp_path, one_line=lines))
    assert text is not None
    assert text.count("Types: deb\n") == 2
    assert "Signed-By: /k.gpg" in text
    assert "no.example" not in text


def test_an_inline_key_is_kept(tmp_path: Path):
    key = "Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abc\n -----END PGP PUBLIC KEY BLOCK-----"
    stanza = f"Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm\nComponents: main\n{key}\n"
    text = sources_for("bookworm", etc(tmp_path, deb822=stanza))
    assert text is not None
    assert " .\n abc\n" in text


def test_a_host_that_is_not_debian_has_no_sources(tmp_path: Path):
    other = etc(tmp_path, ident="ubuntu", deb822=DEB822)
    assert host_codename(other) is None
    assert sources_for("bookworm", other) is None


def test_a_host_without_sources_leaves_the_choice_to_mmdebstrap(tmp_path: Path):
    assert sources_for("bookworm", etc(tmp_path)) is None
