"""What a model should do about each error, in terms of tools.

The key is the error's code. A sentence is left out if it needs a field that the error does not have.
"""

from guest.places import OUTPUTS, WORKSPACE

NEW_SANDBOX = "Call create_sandbox to get a new one."
OPERATOR = "Ask the operator to"
READ_LAST_OUTPUT = (
    "What {run_id} wrote can be read for a while: "
    'read_output(sandbox_id="{sandbox_id}", run_id="{run_id}").'  # a call that can be copied
)

NEXT_STEPS: dict[str, tuple[str, ...]] = {
    "sandbox_not_found": (NEW_SANDBOX,),
    "sandbox_closed": (NEW_SANDBOX,),
    "sandbox_expired": (NEW_SANDBOX,),
    "run_not_found": ("Use a run_id that run_code or run_command returned for this sandbox.",),
    "run_result_dropped": ("Files it wrote are still there; otherwise run it again.",),
    "sandbox_busy": (
        'Wait with read_output(sandbox_id="{sandbox_id}", run_id="{run_id}"), '
        'stop it with stop_run(sandbox_id="{sandbox_id}", run_id="{run_id}"), or use another sandbox.',
    ),
    "stdin_closed": (),
    "stdin_full": (),
    "sandbox_changing": ("Try again in a second.",),
    "sandbox_paused": ('Call resume_sandbox(sandbox_id="{sandbox_id}") first.',),
    "terminal_refused": (),
    "port_refused": (),
    "terminal_closed": (),
    "cannot_freeze": ("Create the sandboxes you need with create_sandbox.",),
    "state_lost": (NEW_SANDBOX,),
    "machine_lost": (NEW_SANDBOX, READ_LAST_OUTPUT),
    "run_lost": ("Run the code again; if that fails too, it may need more memory than there is.", READ_LAST_OUTPUT),
    "run_not_started": ("Run the code again.",),
    "run_refused": (NEW_SANDBOX,),
    "start_failed": ("Try again.", f"If it keeps failing: {OPERATOR.lower()} run `mcp-sandbox doctor`."),
    "machine_not_unique": ("Try again.",),
    "machine_clock_skew": ("Try again.",),
    "pooled_machine_lost": ("Try again.",),
    "template_not_built": (f"{OPERATOR} run `mcp-sandbox template build {{template}}`, then try again.",),
    "template_damaged": (f"{OPERATOR} run `mcp-sandbox template build {{template}}`, then try again.",),
    "template_not_found": (),
    "template_invalid": ("Use another template, or correct template.toml.",),
    "host_not_ready": ("To fix it: {fix}.", f"{OPERATOR} run `mcp-sandbox doctor`."),
    "no_host": ("Use another template, or try again later.",),
    "network_not_enabled": (
        f"Create the sandbox without it, or {OPERATOR.lower()} set {{setting}}. Packages can also be in a template.",
    ),
    "network_not_in_template": (
        f"Ask for less, use another template, or {OPERATOR.lower()} raise network in its template.toml.",
    ),
    "network_unsupported": ('Use network="proxy" or "none".',),
    "domain_not_allowed": (f"Leave it out of allow_domains, or {OPERATOR.lower()} add it to network.allow_domains.",),
    "host_lost": ("Try again.",),
    "host_disk_full": (
        f"Resume or close a paused sandbox (list_sandboxes names them), or {OPERATOR.lower()} free disk space.",
    ),
    "isolation_too_weak": (f"{OPERATOR} set driver to auto or to a stronger driver, or lower min_isolation.",),
    "sandbox_limit_reached": ("Close a sandbox with close_sandbox (list_sandboxes names them), then try again.",),
    "queue_timeout": ("Try again later, or close one of your sandboxes with close_sandbox.",),
    "never_fits": ("Ask for fewer sandboxes at once, or use a template that needs less memory.",),
    "run_limit_reached": ("Wait until a run ends, or stop one with stop_run.",),
    "paused_limit_reached": (
        "Resume or close one of your paused sandboxes (list_sandboxes names them), or try again later.",
    ),
    "bad_request": (),
    "input_too_large": ("Write large data to a file with write_file and let the code read that file.",),
    "wrong_language": ("Use a sandbox of another template.",),
    "web_unavailable": ("Try again.", f"If it keeps failing: {OPERATOR.lower()} run `mcp-sandbox doctor`."),
    "fetch_failed": ("Try another address, or again later.",),
    "fetch_dns": ("Check the spelling of the host.",),
    "fetch_tls": (f"If the site is to be trusted, {OPERATOR.lower()} add its authority with `web.ca_file`.",),
    "fetch_refused": (
        "Use a public address. "
        f"{OPERATOR} allow it with `web.private_networks`, `web.ports` or `web.deny_domains`, as the rule says.",
    ),
    "fetch_too_large": (f"{OPERATOR} raise `web.max_bytes`.",),
    "fetch_timeout": ("Try again later.",),
    "fetch_http_status": ("Check the address; web_search may find another one.",),
    "fetch_robots": ("Use another source.",),
    "artifact_not_found": ("Fetch the address again with fetch_url.",),
    "search_not_set_up": (
        f"{OPERATOR} set `web.searxng_url`, or an API key such as `web.brave_key` or `web.tavily_key`.",
    ),
    "search_failed": ("Try again later, or with other words.", f"{OPERATOR} run `mcp-sandbox doctor --web`."),
    "file_not_found": ("Call list_files on a parent directory to see what exists.",),
    "file_not_permitted": (f"Use a path in {WORKSPACE} or {OUTPUTS}.",),
    "file_too_large": (
        "Write it in parts with write_file(append=true), read it in parts with read_file(offset=…, "
        'encoding="base64"), or let code in the sandbox create or shrink it.',
    ),
    "wrong_file_kind": ("list_files shows what is in a directory, read_file what is in a file.",),
    "sandbox_disk_full": ("Remove files, or use a new sandbox.",),
    "file_timeout": ("Try again, or close the sandbox if it keeps failing.",),
    "file_refused": (),
    "host_dir_not_found": (),
    "host_dir_read_only": (f"Use another directory, or {OPERATOR.lower()} add :rw to it in host_dirs.",),
    "host_file_failed": (),
    "control_failed": (),
    "server_gone": (),
    "no_server": (),
    "bad_url": (),
    "server_unreachable": (),
    "request_refused": (),
    "cannot_copy": (),
    "cannot_forward": (),
    "no_terminal": (),
    "no_active_run": (),
    "measurement_failed": (),
    "demo_failed": (),
    "client_not_found": (),
    "configuration_not_editable": (),
    "unsafe_address": (),
    "address_in_use": (),
    "unknown_tool": (),
    "bad_token_name": (),
    "token_exists": (),
    "token_read_only": ("Use only tools that read, such as list_sandboxes and read_file.",),
    "token_not_found": (),
    "idempotency_key_reused": (),
    "too_many_keys": (),
    "upload_stalled": (),
    "no_connection": (),
    "not_offered": (),
    "token_refused": (),
    "unexpected_answer": (),
}
