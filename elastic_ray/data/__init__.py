"""Data for elastic jobs: which rank uses which sample, with every sample used exactly once per epoch."""
