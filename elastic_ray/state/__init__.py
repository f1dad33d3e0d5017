"""The training state that all ranks share: what it is, and how it travels."""
