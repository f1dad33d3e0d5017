"""Operations on a bucket that give all ranks the mean of its gradients (torch)."""
