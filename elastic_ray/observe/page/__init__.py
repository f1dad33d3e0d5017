"""Web page that shows which job has which of the cluster's slots, since when, and why."""
