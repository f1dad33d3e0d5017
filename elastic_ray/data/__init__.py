"""Data for elastic jobs: which rank takes which sample, in every epoch each exactly once."""
