"""Policies that are ready to use: import them from ``elastic_ray.adaptation``."""
