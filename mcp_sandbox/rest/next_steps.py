"""The HTTP status of each error, and what a program should do about it, in terms of requests.

The key is the error's code. A sentence is left out if it needs a field that the error does not have.
"""

from guest.places import OUTPUTS, WORKSPACE

ROOT = "/api/v1"
RUN = f"{ROOT}/sandboxes/{{sandbox_id}}/runs/{{run_id}}"

NEW_SANDBOX = f"POST {ROOT}/sandboxes creates a new one."
CLOSE_ONE = f"DELETE {ROOT}/sandboxes/ID closes one of yours; GET {ROOT}/sandboxes lists them."
OPERATOR = "Ask the operator to"
READ_LAST_OUTPUT = f"What {{run_id}} wrote can be read for a while: GET {RUN}."
AGAIN = "Try again."

# Errors of commands and of the server's start.
FOR_OPERATORS = (
    "address_in_use",
    "bad_token_name",
    "bad_url",
    "cannot_copy",
    "cannot_forward",
    "client_not_found",
    "configuration_not_editable",
    "control_failed",
    "demo_failed",
    "measurement_failed",
    "no_active_run",
    "no_server",
    "no_terminal",
    "request_refused",
    "server_gone",
    "server_unreachable",
    "token_exists",
    "token_not_found",
    "unknown_tool",
    "unsafe_address",
)

# Errors of tools that REST does not have: files travel in requests there.
FOR_MODELS = ("host_dir_not_found", "host_dir_read_only", "host_file_failed")

# Errors of the SDK.
FOR_CLIENTS = ("no_connection", "not_offered", "token_refused", "unexpected_answer")

# 409, 429 and 503: nothing was done, and the same request may succeed later.
ANSWERS: dict[str, tuple[int, tuple[str, ...]]] = {
    "web_unavailable": (503, (AGAIN, f"If it keeps failing: {OPERATOR.lower()} run `mcp-sandbox doctor`.")),
    "fetch_failed": (502, ("Try another address, or again later.",)),
    "fetch_dns": (502, ("Check the spelling of the host.",)),
    "fetch_tls": (502, (f"If the site is to be trusted, {OPERATOR.lower()} add its authority with `web.ca_file`.",)),
    "fetch_refused": (403, ("Use another address; the operator decides what may be reached.",)),
    "fetch_too_large": (413, (f"{OPERATOR} raise `web.max_bytes`.",)),
    "fetch_timeout": (504, ("Try again later.",)),
    "fetch_http_status": (502, ("Check the address.",)),
    "fetch_robots": (403, ("Use another source.",)),
    "artifact_not_found": (404, ("Fetch the address again.",)),
    "search_not_set_up": (501, (f"{OPERATOR} set up a search provider.",)),
    "search_failed": (502, ("Try again later, or with other words.",)),
    "sandbox_not_found": (404, (NEW_SANDBOX,)),
    "sandbox_closed": (410, (NEW_SANDBOX,)),
    "sandbox_expired": (410, (NEW_SANDBOX,)),
    "run_not_found": (404, ("Use a run_id that a run in this sandbox was answered with.",)),
    "run_result_dropped": (410, ("Files it wrote are still there; otherwise run it again.",)),
    "sandbox_busy": (409, (f"GET {RUN}?wait_s=10 waits for it, POST {RUN}/stop stops it.", "Or use another sandbox.")),
    "stdin_closed": (409, ('Start a run with "stdin_open": true.',)),
    "stdin_full": (409, ("Send the rest when the run reads again.",)),
    "sandbox_changing": (409, ("Try again in a second.",)),
    "sandbox_paused": (409, (f"POST {ROOT}/sandboxes/{{sandbox_id}}/resume first.",)),
    "cannot_freeze": (501, (f"POST {ROOT}/sandboxes creates the sandboxes you need.",)),
    "state_lost": (410, (NEW_SANDBOX,)),
    "machine_lost": (410, (NEW_SANDBOX, READ_LAST_OUTPUT)),
    "run_lost": (
        502,
        ("Run the code again; if that fails too, it may need more memory than there is.", READ_LAST_OUTPUT),
    ),
    "run_not_started": (503, ("Run the code again.",)),
    "terminal_refused": (409, (AGAIN,)),
    "port_refused": (409, ("Start a server in the sandbox that listens on 127.0.0.1:{port}, or try again.",)),
    "terminal_closed": (409, ("Open another one.",)),
    "run_refused": (502, (NEW_SANDBOX,)),
    "start_failed": (503, (AGAIN, f"If it keeps failing: {OPERATOR.lower()} run `mcp-sandbox doctor`.")),
    "machine_not_unique": (503, (AGAIN,)),
    "machine_clock_skew": (503, (AGAIN,)),
    "pooled_machine_lost": (503, (AGAIN,)),
    "template_not_built": (503, (f"{OPERATOR} run `mcp-sandbox template build {{template}}`, then try again.",)),
    "template_damaged": (503, (f"{OPERATOR} run `mcp-sandbox template build {{template}}`, then try again.",)),
    "template_not_found": (422, (f"GET {ROOT}/templates lists all of them.",)),
    "template_invalid": (422, ("Use another template, or correct template.toml.",)),
    "host_not_ready": (503, ("To fix it: {fix}.", f"{OPERATOR} run `mcp-sandbox doctor`.")),
    "no_host": (503, ("Use another template, or try again later.",)),
    "host_lost": (503, (AGAIN,)),
    "host_disk_full": (507, (f"Resume or close a paused sandbox, or {OPERATOR.lower()} free disk space.",)),
    "isolation_too_weak": (503, (f"{OPERATOR} set driver to auto or to a stronger driver, or lower min_isolation.",)),
    "network_not_enabled": (422, ("Create the sandbox without it, or ask the operator to set {setting}.",)),
    "network_not_in_template": (422, ("Ask for less, or use another template.",)),
    "network_unsupported": (422, ('Use "network": "proxy" or "none".',)),
    "domain_not_allowed": (
        422,
        (f"Leave it out of allow_domains, or {OPERATOR.lower()} add it to network.allow_domains.",),
    ),
    "sandbox_limit_reached": (429, (CLOSE_ONE,)),
    "queue_timeout": (503, ("Try again later.", CLOSE_ONE)),
    "never_fits": (422, ("Ask for fewer sandboxes at once, or use a template that needs less memory.",)),
    "run_limit_reached": (429, ("Wait until a run ends, or stop one.",)),
    "paused_limit_reached": (429, ("Resume or close one of your paused sandboxes, or try again later.",)),
    "bad_request": (400, ()),
    "input_too_large": (
        413,
        (f"PUT large data to {ROOT}/sandboxes/ID/files/content?path=PATH and let the code read that file.",),
    ),
    "wrong_language": (422, ("Use a sandbox of another template.",)),
    "file_not_found": (404, (f"GET {ROOT}/sandboxes/ID/files?path=DIRECTORY shows what exists.",)),
    "file_not_permitted": (403, (f"Use a path in {WORKSPACE} or {OUTPUTS}.",)),
    "file_too_large": (
        413,
        (f"PUT it to {ROOT}/sandboxes/ID/files/content?path=PATH, which takes files of any size.",),
    ),
    "wrong_file_kind": (422, (f"GET {ROOT}/sandboxes/ID/files?path=DIRECTORY shows what is there.",)),
    "sandbox_disk_full": (507, ("Remove files, or use a new sandbox.",)),
    "file_timeout": (504, ("Try again, or close the sandbox if it keeps failing.",)),
    "file_refused": (422, ()),
    "upload_stalled": (408, ("Send the file again.",)),
    "token_read_only": (403, ("Use a token that was made without --read-only.",)),
    "idempotency_key_reused": (422, ("Give each new request its own key.",)),
    "too_many_keys": (429, ("Wait until one of them has an answer.",)),
    **dict.fromkeys((*FOR_OPERATORS, *FOR_MODELS, *FOR_CLIENTS), (500, ())),
}
STATUSES = {code: status for code, (status, _) in ANSWERS.items()}
NEXT_STEPS = {code: steps for code, (_, steps) in ANSWERS.items()}
