"""What drivers of microVMs share: small monitors with an HTTP API on a Unix socket, and the agent on vsock."""
