"""Workers of a job as one group: starting, watching, losing and re-adopting them."""
