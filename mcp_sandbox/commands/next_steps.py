"""What a user of the command line should do about each error.

The key is the error's code. A sentence is left out if it needs a field that the error does not have.
"""

LIST = "`mcp-sandbox sandbox list` shows the sandboxes of running servers."
DOCTOR = "`mcp-sandbox doctor` shows more."
AGAIN = "Try again."

NEXT_STEPS: dict[str, tuple[str, ...]] = {
    "sandbox_not_found": (LIST,),
    "sandbox_closed": (),
    "sandbox_expired": (),
    "run_not_found": (),
    "run_result_dropped": (),
    "sandbox_busy": (AGAIN,),
    "sandbox_changing": (AGAIN,),
    "sandbox_paused": (),
    "cannot_freeze": ("Set driver to one that takes snapshots; `mcp-sandbox doctor` shows them.",),
    "state_lost": (),
    "machine_lost": (AGAIN,),
    "run_lost": ("Run the code again; if that fails too, it may need more memory than there is.",),
    "run_not_started": (AGAIN,),
    "run_refused": (AGAIN,),
    "start_failed": (AGAIN, DOCTOR),
    "machine_not_unique": (AGAIN,),
    "machine_clock_skew": (AGAIN,),
    "pooled_machine_lost": (AGAIN,),
    "template_not_built": ("Run `mcp-sandbox template build {template}`.",),
    "template_damaged": ("Run `mcp-sandbox template build {template}`.",),
    "template_not_found": (),
    "template_invalid": ("Correct template.toml.",),
    "host_not_ready": ("To fix it: {fix}.", DOCTOR),
    "no_host": (DOCTOR,),
    "host_lost": (AGAIN,),
    "host_disk_full": ("Free disk space; `mcp-sandbox template prune` removes stale builds.",),
    "isolation_too_weak": ("Set driver to auto or to a stronger driver, or lower min_isolation.",),
    "sandbox_limit_reached": (LIST, "`mcp-sandbox sandbox close ID` closes one."),
    "queue_timeout": ("Try again later, or raise the limit.",),
    "never_fits": ("Raise the limit.",),
    "run_limit_reached": ("Wait until a run ends.",),
    "paused_limit_reached": (LIST, "`mcp-sandbox sandbox close ID` closes one."),
    "bad_request": (),
    "input_too_large": ("Let the code read large data from a file.",),
    "wrong_language": ("Choose another template with --template.",),
    "file_not_found": (),
    "file_not_permitted": (),
    "file_too_large": (),
    "wrong_file_kind": (),
    "sandbox_disk_full": (),
    "file_timeout": (AGAIN,),
    "file_refused": (),
    "control_failed": (),
    "server_gone": ("Try again, or end that process: its sandboxes end with it.",),
    "measurement_failed": (AGAIN,),
    "demo_failed": (AGAIN,),
}
