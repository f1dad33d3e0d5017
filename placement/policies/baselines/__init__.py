"""Policies of others, as published, and simple ones to compare with."""
