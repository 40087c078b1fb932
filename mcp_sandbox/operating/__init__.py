"""What operators and crashes need: records, clean-up, numbers, a socket."""
