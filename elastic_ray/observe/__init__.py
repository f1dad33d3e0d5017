"""Views of jobs and of the cluster for people: a web page, and the trackers of a run."""
