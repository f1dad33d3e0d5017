"""Operations that give all ranks the mean of a bucket's gradients (torch)."""
