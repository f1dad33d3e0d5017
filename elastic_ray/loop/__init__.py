"""Public functions of a train loop, and the session of its thread."""
