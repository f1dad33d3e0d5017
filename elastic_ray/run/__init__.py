"""Components of one run of a train function, below gradient synchronisation."""
