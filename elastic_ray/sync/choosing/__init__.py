"""The fastest strategy, found by measurement: link times, predictions, candidates, trials."""
