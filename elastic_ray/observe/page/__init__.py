"""Web page that shows which job has which slots of the cluster, since when, and why."""
