"""Public functions that a train function calls, and the session of the calling thread."""
