"""The jobs that are simulated: traces, and how fast and long they are."""
