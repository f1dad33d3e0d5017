"""Ready-made policies; import them from ``elastic_ray.adaptation``."""
