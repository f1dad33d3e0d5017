"""Command line ``elastic-ray``. Commands that need a cluster import Ray; only ``doctor`` imports torch."""
