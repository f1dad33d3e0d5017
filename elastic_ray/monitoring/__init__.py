"""Monitoring inside the step: what each worker measures of it, known to all of them."""
