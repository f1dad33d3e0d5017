"""Measurements that are shared by jobs of the same model and kept after the jobs end."""
