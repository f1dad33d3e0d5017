"""Consensus of a group's ranks: announcements before collectives, and agreements."""
