"""What is in a sandbox: definitions, images, and the store of what was built."""
