"""Data loading for elastic jobs: divides samples between ranks so that each sample is used exactly once per epoch."""
