"""Model proxy between an agent in its sandbox and verifiers' interception endpoint."""
