"""Operations that compute the mean of a bucket's gradients for all ranks (torch)."""
