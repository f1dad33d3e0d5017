"""Views of jobs and of the cluster for people: a web page, metrics, and trackers such as TensorBoard."""
