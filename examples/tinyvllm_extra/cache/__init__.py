"""The prefix cache on disk."""
