"""Results of simulations."""
