"""Worker processes, which run the user's train function, and their connection to the job's controller."""
