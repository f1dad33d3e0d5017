"""A job's workers as one: started, watched, lost, found again."""
