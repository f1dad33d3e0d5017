"""What is known of a job and told of it: phase, events, reports, views."""
