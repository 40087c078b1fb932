"""The service over HTTP for programs: JSON, server-sent events and streamed files below /api/v1."""
