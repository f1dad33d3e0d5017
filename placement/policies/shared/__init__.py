"""What policies share: the protocol, who is admitted, how sizes grow and where they fit."""
