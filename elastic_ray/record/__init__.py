"""Records kept for a job, and reports on it: phase, events, reports and views."""
