"""Worker processes that run the user's train function, and their connection to the job's controller."""
