"""Shared parts of policies: the protocol, the admission, the growth of sizes, and where they fit."""
