"""The fastest strategy, found by measurement: candidates, their race, and the choice."""
