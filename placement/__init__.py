"""The cluster's side of elastic jobs: what is a job worth on these resources, and who gets which?

Importing this package loads neither Ray nor torch; only ``placement.ray_cluster`` and the allocator's actor
talk to Ray.
"""
