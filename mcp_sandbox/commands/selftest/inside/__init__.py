"""What the security self-test tries inside a sandbox.

The self-test copies this package into sandboxes as it is. So it uses only the standard library, and relative imports,
because the package has another parent there. Each public function of a topic is an attack: it returns `Attempts`.
"""
