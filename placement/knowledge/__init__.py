"""Measurements that jobs of the same model share, and that are kept after the jobs end."""
