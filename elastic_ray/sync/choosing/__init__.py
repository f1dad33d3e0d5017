"""Selection of the fastest strategy by measurement: candidates, their race, and the choice."""
