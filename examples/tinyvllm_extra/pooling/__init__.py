"""Embeddings and relevance scores."""
