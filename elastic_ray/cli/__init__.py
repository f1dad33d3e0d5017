"""``elastic-ray`` on the command line. Commands that need a cluster load Ray; only ``doctor`` loads torch."""
