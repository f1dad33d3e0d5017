"""Views of jobs and the cluster for people: a web page, metrics, and trackers such as TensorBoard."""
