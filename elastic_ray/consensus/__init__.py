"""Consensus between a group's ranks: announcements before collectives, and decisions that all ranks share."""
