"""Records of a job and reports on it: phase, events, reports, views."""
