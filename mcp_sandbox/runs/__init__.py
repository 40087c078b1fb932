"""One run of code, and the calls around it."""
