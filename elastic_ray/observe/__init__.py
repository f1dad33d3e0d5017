"""Observation of jobs and of the cluster for people: a page, and the trackers of a run."""
