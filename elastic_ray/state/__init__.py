"""Training state that all ranks share, and its transfer between ranks."""
