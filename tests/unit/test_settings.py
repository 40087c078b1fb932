"""One model of settings, four sources, and no silent mistakes."""

import logging
import os
import re
from pathlib import Path

import pytest

from mcp_sandbox.commands.common import environment
from mcp_sandbox.config import (
    CONFIG_NAME,
    PROJECT_SETTINGS,
    ConfigError,
    load_settings,
    setting_names,
    user_config_file,
    variable_of,
)
from mcp_sandbox.serving.stdio_server import log_config_files


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start each test without configuration."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name, _ in setting_names():
        monkeypatch.delenv(variable_of(name), raising=False)


def write_config(text: str) -> None:
    path = user_config_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_project_config(text: str) -> None:
    Path(CONFIG_NAME).write_text(text)


def test_flags_win_over_variables_and_variables_over_the_file(monkeypatch: pytest.MonkeyPatch):
    write_config('driver = "a"\naccel = "tcg"\n[limits]\nsandboxes = 3\nrestores = 2\n')
    assert load_settings().limits.sandboxes == 3
    monkeypatch.setenv("MCP_SANDBOX_LIMITS_SANDBOXES", "4")
    monkeypatch.setenv("MCP_SANDBOX_DRIVER", "b")
    settings = load_settings(driver=None, limits={"sandboxes": 5})
    assert (settings.limits.sandboxes, settings.driver, settings.accel) == (5, "b", "tcg")


def test_the_projects_file_wins_over_the_users():
    write_config('template = "a"\n[runs]\ntimeout_s = 7\nmax_timeout_s = 50\n')
    write_project_config('template = "b"\n[runs]\ntimeout_s = 9\n')
    settings = load_settings()
    assert (settings.template, settings.runs.timeout_s, settings.runs.max_timeout_s) == ("b", 9, 50)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("home", '"h"'),
        ("driver", '"bubblewrap"'),
        ("min_isolation", '"namespace"'),
        ("template_path", '["t"]'),
        ("guest_kernel", '"vmlinuz"'),
        ("network.allow_domains", '["*"]'),
        ("allow_nat", "true"),
        ("limits.sandboxes", "1000"),
        ("runs.max_timeout_s", "9999"),
    ],
)
def test_a_project_can_neither_run_code_nor_weaken_isolation_or_limits(name: str, value: str):
    write_project_config(f"{name} = {value}\n")
    with pytest.raises(ConfigError, match=f"a project may not set '{re.escape(name)}'") as refusal:
        load_settings()
    assert variable_of(name) in str(refusal.value)


def test_a_project_may_set_only_harmless_settings():
    assert {"template", "toolsets", "runs.timeout_s", "lifetime.idle_s"} == PROJECT_SETTINGS
    assert set(dict(setting_names())) >= PROJECT_SETTINGS


def test_an_unknown_key_in_the_file_is_named():
    write_config("[limits]\nsandboxen = 3\n")
    with pytest.raises(ConfigError, match=r"toml: unknown setting 'limits.sandboxen'; did you mean limits.sandboxes\?"):
        load_settings()


def test_a_bad_value_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MCP_SANDBOX_LIMITS_SANDBOXES", "many")
    with pytest.raises(ConfigError, match=r"limits\.sandboxes"):
        load_settings()


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_a_duration_is_finite(monkeypatch: pytest.MonkeyPatch, value: str):
    monkeypatch.setenv("MCP_SANDBOX_RUNS_MAX_TIMEOUT_S", value)  # it is in the schemas of tools, and JSON has neither
    with pytest.raises(ConfigError, match=r"runs\.max_timeout_s: .*finite"):
        load_settings()


def test_a_misspelled_variable_is_refused_with_the_right_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MCP_SANDBOX_MIN_ISOLATON", "vm")
    with pytest.raises(ConfigError, match="MCP_SANDBOX_MIN_ISOLATON; did you mean MCP_SANDBOX_MIN_ISOLATION"):
        load_settings()


def test_sources_fill_one_group_together(monkeypatch: pytest.MonkeyPatch):
    write_config("[pool]\nmin = 2\nmax = 3\n")
    monkeypatch.setenv("MCP_SANDBOX_POOL_MAX_AGE_S", "60")
    pool = load_settings(pool={"max": 5}).pool
    assert (pool.min, pool.max, pool.max_age_s) == (2, 5, 60)


def test_a_file_that_is_not_toml_is_named():
    write_config("sandboxes 3")
    with pytest.raises(ConfigError, match=r"mcp-sandbox\.toml"):
        load_settings()


def test_a_default_above_its_maximum_is_refused():
    with pytest.raises(ConfigError, match="max_timeout_s"):
        load_settings(runs={"timeout_s": 20, "max_timeout_s": 10})
    with pytest.raises(ConfigError, match="max_idle_s"):
        load_settings(lifetime={"idle_s": 20, "max_idle_s": 10})


def test_a_child_server_inherits_the_settings_from_every_source(monkeypatch: pytest.MonkeyPatch):
    network = {"allow_domains": ["pypi.org", "*.example.com"], "private_networks": {"lab": "10.0.0.0/8"}}
    settings = load_settings(driver="gvisor", min_isolation="kernel", limits={"sandboxes": 3}, network=network)
    for name, value in environment(settings).items():
        monkeypatch.setenv(name, value)
    assert load_settings() == settings


def test_the_network_of_sandboxes_can_be_set_in_every_source(monkeypatch: pytest.MonkeyPatch):
    assert load_settings().network.allow_domains == ()
    assert not load_settings().network.enabled
    write_config('[network]\nallow_domains = ["Pypi.org"]\nports = [8080]\nprivate_networks = {lab = "10.1.0.0/16"}')
    network = load_settings().network
    assert (network.allow_domains, network.ports) == (("pypi.org",), (8080,))
    assert {name: str(net) for name, net in network.private_networks.items()} == {"lab": "10.1.0.0/16"}
    monkeypatch.setenv("MCP_SANDBOX_NETWORK_ALLOW_DOMAINS", "*.Example.com, bücher.example")
    monkeypatch.setenv("MCP_SANDBOX_NETWORK_PORTS", "443")
    monkeypatch.setenv("MCP_SANDBOX_NETWORK_PRIVATE_NETWORKS", "a=10.0.0.0/8,b=fd00::/8")
    network = load_settings().network
    assert (network.allow_domains, network.ports) == (("*.example.com", "xn--bcher-kva.example"), (443,))
    assert sorted(network.private_networks) == ["a", "b"]


@pytest.mark.parametrize("domain", ["*", "a b", "*.*.org", "https://pypi.org", ""])
def test_a_domain_is_a_name(domain: str):
    with pytest.raises(ConfigError, match=r"network\.deny_domains"):
        load_settings(network={"deny_domains": [domain]})


def test_every_domain_may_be_allowed_at_once():
    network = load_settings(network={"allow_domains": ["*"]}).network
    assert network.enabled
    assert network.policy().allow is None
    assert network.policy(("pypi.org",)).only == ("pypi.org",)


def test_every_directory_is_below_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MCP_SANDBOX_HOME", str(tmp_path / "home"))
    settings = load_settings()
    assert settings.home == tmp_path / "home"
    assert settings.run_dir.is_relative_to(settings.home)
    assert settings.cache_dir.is_relative_to(settings.home)


def test_template_path_can_be_set_in_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert load_settings().template_path == (tmp_path / "config" / "mcp-sandbox" / "templates",)
    write_config('template_path = ["/a", "~/b"]')
    assert load_settings().template_path == (Path("/a"), Path.home() / "b")
    monkeypatch.setenv("MCP_SANDBOX_TEMPLATE_PATH", f"/c{os.pathsep}~/d")
    assert load_settings().template_path == (Path("/c"), Path.home() / "d")
    settings = load_settings(template_path=(Path("/e"), Path("/f")))
    assert settings.template_path == (Path("/e"), Path("/f"))
    assert environment(settings)["MCP_SANDBOX_TEMPLATE_PATH"] == f"/e{os.pathsep}/f"


def test_a_relative_flag_does_not_depend_on_later_directories(tmp_path: Path):
    settings = load_settings(home=Path("data"), template_path=(Path("a"), Path("/b")))
    assert settings.home == tmp_path / "here" / "data"
    assert settings.template_path == (tmp_path / "here" / "a", Path("/b"))


@pytest.mark.parametrize("name", ["home", "guest_kernel", "guest_modules", "template_path"])
def test_only_a_flag_may_be_relative_to_the_working_directory(name: str, monkeypatch: pytest.MonkeyPatch):
    """A server that an IDE starts in a stranger's repository would use files from there."""
    monkeypatch.setenv(variable_of(name), "data")
    with pytest.raises(ConfigError, match=f"{name}.*data is not an absolute path"):
        load_settings()
    monkeypatch.delenv(variable_of(name))
    write_config("template_path = ['data']\n" if name == "template_path" else f"{name} = 'data'\n")
    with pytest.raises(ConfigError, match=f"{name}.*data is not an absolute path"):
        load_settings()


def test_a_relative_xdg_directory_names_no_file_of_the_working_directory(monkeypatch: pytest.MonkeyPatch):
    (Path("planted") / "mcp-sandbox").mkdir(parents=True)
    (Path("planted") / "mcp-sandbox" / CONFIG_NAME).write_text('driver = "bubblewrap"\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", "planted")
    monkeypatch.setenv("XDG_DATA_HOME", "planted")
    assert load_settings().driver == "auto"
    assert not load_settings().home.is_relative_to(Path.cwd())
    monkeypatch.setattr("platformdirs.user_config_path", lambda name: Path("planted") / name)  # older releases
    with pytest.raises(ConfigError, match="XDG_CONFIG_HOME is not an absolute path"):
        load_settings()


def test_a_users_file_that_others_can_write_is_refused():
    write_config('driver = "qemu"\n')
    user_config_file().chmod(0o666)
    with pytest.raises(
        ConfigError, match=rf"{re.escape(str(user_config_file()))} can be changed by other users.*chmod"
    ):
        load_settings()


def test_the_server_warns_that_it_reads_the_projects_file(caplog: pytest.LogCaptureFixture):
    write_config('template = "a"\n')
    write_project_config('template = "b"\n')
    with caplog.at_level(logging.INFO):
        log_config_files()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"settings from {Path.cwd() / CONFIG_NAME}"),
        ("INFO", f"settings from {user_config_file()}"),
    ]


def test_no_dotenv_file_is_read():
    Path(".env").write_text("MCP_SANDBOX_DRIVER=bubblewrap\n")
    assert load_settings().driver == "auto"


def test_the_variable_of_web_tools_is_not_taken_for_a_field_of_the_group(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MCP_SANDBOX_WEB_TOOLS", "false")
    monkeypatch.setenv("MCP_SANDBOX_WEB_MERGE", "true")
    settings = load_settings()
    assert (settings.web_tools, settings.web.merge) == (False, True)
    write_config("[web]\ntools = true\n")
    with pytest.raises(ConfigError, match=r"unknown setting 'web\.tools'"):
        load_settings()


def test_search_providers_are_those_that_are_set_up(monkeypatch: pytest.MonkeyPatch):
    assert load_settings().web.search_providers == ("duckduckgo",)
    write_config('[web]\nexa_key = "k"\nsearxng_url = "https://searx.example.org/"\n')
    web = load_settings().web
    assert web.search_providers == ("searxng", "exa", "duckduckgo")
    assert web.searxng_url == "https://searx.example.org"
    monkeypatch.setenv("MCP_SANDBOX_WEB_PROVIDERS", "exa, searxng")
    assert load_settings().web.search_providers == ("exa", "searxng")
    monkeypatch.setenv("MCP_SANDBOX_WEB_PROVIDERS", " ")
    assert load_settings().web.search_providers == ()


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("providers", '["brave"]', "providers names brave, but brave_key is not set"),
        ("providers", '["altavista"]', "web.providers.0: Input should be 'searxng'"),
        ("providers", '["duckduckgo", "duckduckgo"]', "a provider is named twice"),
        ("google_key", '"s3cret"', "google_key and google_cx belong together"),
        ("searxng_url", '"https://user:s3cret@searx.example.org"', "must not contain a user name or password"),
        ("searxng_url", '"searx.example.org"', "it must be like https://searx.example.org"),
        ("searxng_url", '"http://127.1:8888"', "web.searxng_url"),
        ("brave_key", "7", "web.brave_key"),
    ],
)
def test_a_bad_web_setting_is_named_and_no_key_is_shown(name: str, value: str, problem: str):
    write_config(f"[web]\n{name} = {value}\n")
    with pytest.raises(ConfigError) as refusal:
        load_settings()
    assert problem in str(refusal.value)
    assert "s3cret" not in str(refusal.value)


def test_keys_reach_a_child_server_and_no_dump(monkeypatch: pytest.MonkeyPatch):
    write_config('[web]\nbrave_key = "s3cret"\nproviders = ["duckduckgo", "brave"]\n')
    settings = load_settings()
    for dump in (repr(settings), str(settings), settings.model_dump_json(), str(settings.model_dump())):
        assert "s3cret" not in dump
    for name, value in environment(settings).items():
        monkeypatch.setenv(name, value)
    user_config_file().unlink()
    assert load_settings() == settings


def test_lists_in_variables_may_have_spaces(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MCP_SANDBOX_SERVE_ALLOWED_HOSTS", "a.example, b.example")
    monkeypatch.setenv("MCP_SANDBOX_TOOLSETS", "code, files")
    settings = load_settings()
    assert settings.serve.allowed_hosts == ("a.example", "b.example")
    assert list(settings.toolsets) == ["code", "files"]


def test_a_variable_in_lower_case_is_refused_instead_of_ignored(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("mcp_sandbox_limits_sandboxes", "2")
    with pytest.raises(ConfigError, match="MCP_SANDBOX_LIMITS_SANDBOXES"):
        load_settings()
