"""Web page that shows a cluster: which job has which slots, since when, and why."""
