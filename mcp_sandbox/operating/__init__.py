"""For operators: the registry, recovery after a crash, metrics and the control socket."""
