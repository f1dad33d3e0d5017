"""The cluster's side of elastic jobs: what is a job worth on these resources, and who gets which?

Importing this package loads neither Ray nor torch; only ``placement.actor``, ``placement.groups`` and
``placement.snapshot`` talk to Ray.
"""
