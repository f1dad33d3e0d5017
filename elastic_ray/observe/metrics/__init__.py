"""A job's metrics for Prometheus, through Ray's own agents, and the Grafana dashboard that shows them."""
