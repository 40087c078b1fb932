"""Commands that use a running server, on this host or elsewhere, over REST."""
