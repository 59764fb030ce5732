"""/v1/responses and /v1/messages, the protocols of coding agents."""
