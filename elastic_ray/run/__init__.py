"""What one run of a train function consists of, below the way in which its gradients are synchronised."""
