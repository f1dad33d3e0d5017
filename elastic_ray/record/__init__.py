"""Records kept about a job, and reports on it: phase, events, reports and views."""
