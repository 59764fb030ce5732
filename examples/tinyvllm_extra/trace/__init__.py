"""The trace of an engine's steps: requests, tokens, block tables and times."""
