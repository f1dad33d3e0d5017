"""Data loading for elastic jobs: divides samples among ranks so that each is used exactly once per epoch."""
