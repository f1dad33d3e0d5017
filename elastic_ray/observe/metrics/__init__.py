"""Metrics of a job for Prometheus, exported through Ray's own agents, and a Grafana dashboard that shows them."""
